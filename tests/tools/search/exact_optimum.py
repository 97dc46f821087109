"""The shortest makespan there is, by an exact solver: what bounds and the search are compared with.

The model restates the rules on purpose, in the solver's terms: intervals that do not overlap on
a rank or a link, precedences along the chain, memory as demands from F to I and on to W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.schedule import Costs, Placement

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

__all__ = ["optimum"]

Key = tuple[str, int, int]  # op, stage, microbatch


class _Model:
    """The solver's model of one pipeline. All times and sizes are whole numbers."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs) -> None:
        from ortools.sat.python import cp_model  # a second of imports, for few tests

        self.placement, self.microbatches, self.costs = placement, microbatches, costs
        self.sizes = [int(size) for size in costs.scale(microbatches)]
        forward, _, backward, weight = costs.by_op(placement.stages)
        self.lengths = {"F": forward, "I": backward, "W": weight}
        ways = [costs.wire(stage, stage + 1, way) for stage, way, _ in self._crossings()]
        work = sum(map(sum, self.lengths.values())) + sum(map(sum, ways))
        self.horizon = int(work * sum(self.sizes) + sum(delay for _, delay in ways) * microbatches)
        self.solver = cp_model.CpModel()
        self.start: dict[Key, cp_model.IntVar] = {}
        self.end: dict[Key, cp_model.LinearExpr] = {}
        self.machines: dict[object, list[cp_model.IntervalVar]] = {}

    def _crossings(self) -> list[tuple[int, tuple[int, int], int]]:
        """(stage before the link, ranks from and to, 1 ahead or -1 back) of all links between ranks."""
        home = self.placement.by_stage
        pairs = [(stage, (home[stage], home[stage + 1])) for stage in range(self.placement.stages - 1)]
        return [(stage, way[::turn], turn) for stage, way in pairs if way[0] != way[1] for turn in (1, -1)]

    def add_computes(self) -> None:
        """One thing at a time on each rank, W after I; microbatches that are alike keep their order."""
        alike = len(set(self.sizes)) == 1
        for stage in range(self.placement.stages):
            for microbatch, size in enumerate(self.sizes):
                for op, times in self.lengths.items():
                    self._job((op, stage, microbatch), int(times[stage]) * size, self.placement.rank_of(stage))
                    if microbatch and alike:
                        self.solver.add(self.start[op, stage, microbatch] >= self.end[op, stage, microbatch - 1])
                self.solver.add(self.start["W", stage, microbatch] >= self.end["I", stage, microbatch])

    def _job(self, key: Key, length: int, machine: object) -> None:
        self.start[key] = self.solver.new_int_var(0, self.horizon, str(key))
        self.end[key] = self.start[key] + length
        interval = self.solver.new_interval_var(self.start[key], length, self.end[key], str(key))
        self.machines.setdefault(machine, []).append(interval)

    def add_messages(self) -> None:
        """Every microbatch goes down the chain and back; what a message occupies, it occupies alone."""
        crossing = {(stage, turn): way for stage, way, turn in self._crossings()}
        for microbatch, size in enumerate(self.sizes):
            for stage in range(self.placement.stages - 1):
                for turn, op, before, after in ((1, "F", stage, stage + 1), (-1, "I", stage + 1, stage)):
                    done = self.end[op, before, microbatch]
                    if (stage, turn) in crossing:
                        way = crossing[stage, turn]
                        occupied, delay = self.costs.wire(stage, stage + 1, way)
                        key = ("ahead" if turn > 0 else "back", stage, microbatch)
                        self._job(key, int(occupied) * size, way)
                        self.solver.add(self.start[key] >= done)
                        done = self.end[key] + int(delay)
                    self.solver.add(self.start[op, after, microbatch] >= done)
            last = self.placement.stages - 1
            self.solver.add(self.start["I", last, microbatch] >= self.end["F", last, microbatch])
        for intervals in self.machines.values():
            self.solver.add_no_overlap(intervals)

    def add_memory(self, caps: Sequence[int]) -> None:
        """What F takes, I gives back in part and W for the rest."""
        stages = self.placement.stages
        activation, held = (self.costs.per_stage(name, stages) for name in ("activation", "held"))
        for rank, cap in enumerate(caps):
            intervals, demands = [], []
            for stage in self.placement.stages_of(rank):
                for microbatch, size in enumerate(self.sizes):
                    for last, demand in (("W", held[stage]), ("I", activation[stage] - held[stage])):
                        length = self.solver.new_int_var(0, self.horizon, "")
                        first, end = self.start["F", stage, microbatch], self.end[last, stage, microbatch]
                        intervals.append(self.solver.new_interval_var(first, length, end, ""))
                        demands.append(int(demand) * size)
            self.solver.add_cumulative(intervals, demands, cap)

    def solve(self, span: bool, seconds: float) -> float | None:
        """The optimum, or None if it was not proved in that time."""
        from ortools.sat.python import cp_model

        longest = self.solver.new_int_var(0, self.horizon, "objective")
        for rank in range(self.placement.ranks):
            own = self.placement.stages_of(rank)
            first = self.start["F", own[0], 0] if span else 0
            for stage in own:
                for microbatch in range(self.microbatches):
                    self.solver.add(longest >= self.end["W", stage, microbatch] - first)
        self.solver.minimize(longest)
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C as the end of the process
        solver.parameters.num_workers = 2
        solver.parameters.max_time_in_seconds = seconds
        return solver.objective_value if solver.solve(self.solver) == cp_model.OPTIMAL else None


def optimum(
    placement: Placement,
    microbatches: int,
    costs: Costs,
    memory: int | Sequence[int] | None,
    span: bool = False,
    seconds: float = 120.0,
) -> float | None:
    """For whole-number costs by stage, or None if the solver has not proved it in that time."""
    model = _Model(placement, microbatches, costs)
    model.add_computes()
    model.add_messages()
    if memory is not None:
        model.add_memory([memory] * placement.ranks if isinstance(memory, int) else memory)
    return model.solve(span, seconds)
