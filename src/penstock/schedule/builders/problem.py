"""What is searched over, as flat arrays of whole numbers.

A search looks at thousands of orders, so an action is one whole number here and everything
about it is one look-up. With S stages and M microbatches, and `size` for S * M,

    0 ... size - 1           F of stage number // M, microbatch number % M
    size ... 2 * size - 1    I, in the same way
    2 * size and on          W, in the same way

so an action that stands `size` lower is the one of the same stage and microbatch that must
come before it on its own rank. Whom an F or I feeds on other ranks is asked of the one
dependency rule, once for each (op, stage): on a chain each feeds exactly one other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import Any, Literal

from penstock.rules import check_count
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.columns import Columns
from penstock.schedule.dependencies import Value, needs
from penstock.schedule.lowering.align import align
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs, memory_by_op
from penstock.schedule.topology import Topology

ROUNDING = 1e-9  # relative: sums of thirds
MORE = 1.3  # W than the shortest way takes are kept for the time between two steps
LARGE = 100_000  # computes; from here on a rule takes the better part of a second
Objective = Literal["makespan", "span", "steady"]
Orders = list[list[int]]  # By rank: its actions in order, as numbers.
OPS = FORWARD, _, WEIGHT = (Op.F, Op.I, Op.W)
FULL = Op.B
SHARED = ("forward", "input", "weight", "activation", "held", "kept")


def stage_costs(costs: Costs, stages_per_rank: int) -> Costs:
    """Return the costs of one stage, from those of a whole rank. What is given per stage stays as it is.

    A hop costs the same however small the stages are.

    Args:
        costs: Costs of all stages of a rank together.
        stages_per_rank: Number of stages per rank.
    """
    check_count("stages_per_rank", stages_per_rank)
    values = {name: getattr(costs, name) for name in SHARED}
    shared: dict[str, Any] = {
        name: value / stages_per_rank for name, value in values.items() if isinstance(value, (int, float))
    }
    return replace(costs, **shared)


class Problem:
    """One placement under costs by stage and a cap for each rank.

    x: the number of an action
    time[x]   how long it takes        wires[x]   (time on the link, delay after that, link) of what it makes
    feeds[x]  whom it feeds, or -1     takes[x]   memory that it adds, below 0 where it gives back
                                       room[x]    memory that must be free for it

    A backward that recomputes, or that leaves more behind than the forward did, needs room. So that it always gets it
    while orders are made, the forwards of its rank leave `spare` alone; of a whole order it is seen whether it fits,
    and `least_room` is what must be free.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        caps: Sequence[float],
        *,
        objective: Objective = "makespan",
        recompute: frozenset[int] = frozenset(),
    ) -> None:
        self.placement, self.microbatches, self.costs, self.objective = placement, microbatches, costs, objective
        self.recompute = recompute
        self.ranks, self.stages = placement.ranks, placement.stages
        self.size = self.stages * microbatches
        self.memory = tuple(caps)
        self.caps = [cap * (1 + ROUNDING) for cap in caps]
        self.topology = Topology.chain(self.stages)
        costs.check_edges(self.topology)
        forward, _, backward, weight = costs.recomputed(self.stages, recompute).by_op(self.stages)
        self._times = [*forward, *backward, *weight]
        self._count_memory()
        work = [sum(times) for times in zip(forward, backward, weight, strict=True)]
        self.busiest = max(sum(work[stage] for stage in placement.stages_of(rank)) for rank in range(self.ranks))

    def shorter(self, microbatches: int) -> Problem:
        """Return the same with another number of microbatches."""
        options: dict[str, Any] = {"objective": self.objective, "recompute": self.recompute}
        return Problem(self.placement, microbatches, self.costs, self.memory, **options)

    @cached_property
    def even(self) -> Problem:
        """The same with all stages as long as they are on average, in the same memory; itself where they are."""
        names = ("forward", "input", "weight")
        times = {name: self.costs.per_stage(name, self.stages) for name in names}
        if all(len(set(each)) == 1 for each in times.values()):
            return self
        means: dict[str, Any] = {name: sum(each) / self.stages for name, each in times.items()}
        options: dict[str, Any] = {"objective": self.objective, "recompute": self.recompute}
        return Problem(self.placement, self.microbatches, replace(self.costs, **means), self.memory, **options)

    def _count_memory(self) -> None:
        forward, _, backward, _ = memory_by_op(self.costs, self.stages, self.recompute)
        self.held = self.costs.per_stage("held", self.stages)
        self.most = tuple(size for size, _ in forward)
        self.input_room = [room for room, _ in backward]
        owned = [self.placement.stages_of(rank) for rank in range(self.ranks)]
        self.spare = [max(0.0, *(self.input_room[stage] for stage in stages)) for stages in owned]
        self._given_back = [-held for held in self.held]

    # the arrays are made when they are asked for: of some placements, the bound says enough

    @cached_property
    def time(self) -> list[float]:
        """How long each action takes."""
        return self._spread(self._times)

    @cached_property
    def takes(self) -> list[float]:
        """The memory that each action adds."""
        after = [held - most for held, most in zip(self.held, self.most, strict=True)]
        return self._spread([*self.most, *after, *self._given_back])

    @cached_property
    def room(self) -> list[float]:
        """The memory that must be free for each action while orders are made."""
        needed = [most + self.spare[rank] for most, rank in zip(self.most, self.placement.by_stage, strict=True)]
        return self._spread([*needed, *self.input_room, *self._given_back])

    @cached_property
    def least_room(self) -> list[float]:
        """The memory that must be free for each action of a whole order."""
        return self._spread([*self.most, *self.input_room, *self._given_back])

    @cached_property
    def feeds(self) -> list[int]:
        """Whom each action feeds, or -1."""
        return self._links[0]

    @cached_property
    def wires(self) -> list[tuple[float, float, int]]:
        """Time on the link, delay after that, and the link, of what each action makes."""
        return self._links[1]

    @cached_property
    def between(self) -> list[int]:
        """How many W each rank should keep for the time between two steps that overlap, until its next F is there.

        Its last I is of its first stage. From there the gradient goes to the first stage, and the first forward of the
        next step comes from there.
        """
        count, size, stages = self.microbatches, self.size, range(self.stages)
        ways = [
            sum(self._times[place] + sum(self.wires[place * count][:2]) for place in (stage, self.stages + stage))
            for stage in stages
        ]
        hops_back = [sum(self.wires[size + stage * count][:2]) for stage in stages]
        found = []
        for rank in range(self.ranks):
            owned = self.placement.stages_of(rank)
            first, weight = owned[0], sum(self._times[2 * self.stages + stage] for stage in owned) / len(owned)
            way = sum(ways[:first]) + hops_back[first]
            found.append(round(MORE * way / weight) if weight else 0)
        return found

    def _spread(self, by_place: Sequence[float]) -> list[float]:
        return [each for value in by_place for each in repeat(value, self.microbatches)]

    @cached_property
    def _links(self) -> tuple[list[int], list[tuple[float, float, int]]]:
        home, stages, count = self.placement.by_stage, self.stages, self.microbatches
        shift, wire = [0] * (3 * stages), [(0.0, 0.0, -1)] * (3 * stages)
        for half, op in enumerate((Op.F, Op.I)):
            for stage in range(stages):
                for value, source in needs(op, stage, self.topology):
                    if value is Value.OUTPUT and source == stage < stages - 1:
                        continue  # the stage's own output: there long before the gradient
                    maker = source + (0 if value is Value.OUTPUT else stages)
                    shift[maker] = half * stages + stage - maker
                    if home[source] != home[stage]:
                        way = (home[source], home[stage])
                        times = self.costs.wire(min(source, stage), max(source, stage), way)
                        wire[maker] = (*times, home[source] * self.ranks + home[stage])
        feeds: list[int] = []
        wires: list[tuple[float, float, int]] = []
        for place in range(3 * stages):
            by = shift[place] * count
            feeds += range(place * count + by, (place + 1) * count + by) if by else repeat(-1, count)
            wires += [wire[place]] * count
        return feeds, wires

    def least_memory(self, rank: int) -> float:
        """Return what one microbatch holds on a rank when it has passed all stages."""
        return sum(self.most[stage] for stage in self.placement.stages_of(rank)) + self.spare[rank]

    # -- to and from actions

    def numbers(self, rows: Sequence[Sequence[Action]]) -> Orders:
        """Turn a builder's rows into numbers; a full backward is its two halves, which is never slower."""
        count, half = self.microbatches, self.size
        found: Orders = []
        for row in rows:
            order: list[int] = []
            for action in row:
                for stage, op, microbatch, _, _ in (action,) if action.pair is None else action.parts():
                    x = stage * count + microbatch
                    if op is FORWARD:
                        order.append(x)
                    elif op is WEIGHT:
                        order.append(x + 2 * half)
                    else:
                        order.append(x + half)
                        if op is FULL:
                            order.append(x + 2 * half)
            found.append(order)
        return found

    def action(self, x: int) -> Action:
        """Return the action of a number."""
        third, x = divmod(x, self.size)
        stage, microbatch = divmod(x, self.microbatches)
        return trusted(stage, OPS[third], microbatch)

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """Make the aligned schedule of complete orders."""
        return schedule_of(orders, self.placement, self.topology, self.microbatches, self.recompute, name)


def schedule_of(
    orders: Orders, placement: Placement, topology: Topology, microbatches: int, recompute: frozenset[int], name: str
) -> Schedule:
    """Make the aligned schedule of complete orders, without an object for each action."""
    import numpy as np

    lengths = tuple(map(len, orders))
    starts = np.array([0, *accumulate(lengths)])
    numbers = np.fromiter(chain.from_iterable(orders), dtype=np.int64, count=int(starts[-1]))
    third, rest = np.divmod(numbers, placement.stages * microbatches)
    stage, microbatch = (part.astype(np.int32) for part in np.divmod(rest, microbatches))
    position = (np.arange(len(numbers)) - np.repeat(starts[:-1], lengths)).astype(np.int32)
    op, peer = np.array(OPS, dtype=np.int8)[third], np.full(len(numbers), -1, dtype=np.int32)
    return align(
        Schedule(
            Columns(lengths, starts, position, stage, op, microbatch, peer),
            placement=placement,
            microbatches=microbatches,
            topology=topology,
            forward_only=False,
            recompute=recompute,
            name=name,
            passes=(),
        )
    )
