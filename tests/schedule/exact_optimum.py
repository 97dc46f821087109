"""The shortest makespan there is, by an exact solver: what the search is compared with.

The model restates the rules on purpose, in the solver's terms: intervals that do not overlap on
a rank, precedences along the chain, memory as demands from F to I and on to W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule import Costs, Placement

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["optimum"]


def optimum(placement: Placement, microbatches: int, costs: Costs, memory: int | None, span: bool = False) -> float:
    """For whole-number costs by stage; small enough that the solver ends."""
    from ortools.sat.python import cp_model  # a second of imports, for few tests

    stages, ranks = placement.stages, placement.ranks
    forward, _, backward, weight = costs.by_op(stages)
    activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
    hop = int(costs.hop)
    lengths = {"F": forward, "I": backward, "W": weight}
    horizon = int(microbatches * (sum(forward) + sum(backward) + sum(weight)) + 2 * stages * microbatches * hop)
    model = cp_model.CpModel()
    start, end, on_rank = {}, {}, [[] for _ in range(ranks)]
    demands: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(ranks)]

    def from_to(first: tuple[str, int, int], last: tuple[str, int, int], demand: int) -> None:
        length = model.new_int_var(0, horizon, "")
        whole = model.new_interval_var(start[first], length, end[last], "")
        demands[placement.rank_of(first[1])].append((whole, demand))

    for stage in range(stages):
        for microbatch in range(microbatches):
            for op, times in lengths.items():
                key = (op, stage, microbatch)
                start[key] = model.new_int_var(0, horizon, str(key))
                end[key] = start[key] + int(times[stage])
                on_rank[placement.rank_of(stage)].append(
                    model.new_interval_var(start[key], int(times[stage]), end[key], str(key))
                )
            model.add(start["W", stage, microbatch] >= end["I", stage, microbatch])
            from_to(("F", stage, microbatch), ("W", stage, microbatch), int(held[stage]))
            from_to(("F", stage, microbatch), ("I", stage, microbatch), int(activation[stage] - held[stage]))
            if microbatch:  # microbatches are alike
                model.add(start["F", stage, microbatch] >= start["F", stage, microbatch - 1])
    for microbatch in range(microbatches):
        for stage in range(stages - 1):
            gap = hop if placement.rank_of(stage) != placement.rank_of(stage + 1) else 0
            model.add(start["F", stage + 1, microbatch] >= end["F", stage, microbatch] + gap)
            model.add(start["I", stage, microbatch] >= end["I", stage + 1, microbatch] + gap)
        model.add(start["I", stages - 1, microbatch] >= end["F", stages - 1, microbatch])
    for rank in range(ranks):
        model.add_no_overlap(on_rank[rank])
        if memory is not None:
            model.add_cumulative([whole for whole, _ in demands[rank]], [size for _, size in demands[rank]], memory)
    longest = model.new_int_var(0, horizon, "objective")
    for rank in range(ranks):
        first = start["F", placement.stages_of(rank)[0], 0] if span else 0
        for stage in placement.stages_of(rank):
            for microbatch in range(microbatches):
                model.add(longest >= end["W", stage, microbatch] - first)
    model.minimize(longest)
    return _solved(model)


def _solved(model: cp_model.CpModel) -> float:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C as the end of the process
    solver.parameters.num_workers = 2
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value
