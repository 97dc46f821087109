"""A pipeline of any shape as flat arrays: stages that skip, links that differ, microbatches that differ.

The numbering is that of `search/problem.py`: with S stages and M microbatches, F of a stage is at stage * M +
microbatch, I stands S * M higher, W twice that. What differs is what an action sets free. In `problem.py` it is one
other action; here it is a list of messages, each with the actions that must have run before it leaves and those that
read it:

    F of a stage             one message to each rank that reads its output
    I of the stages of one   one message to the producer: the sum of their gradients, when the last of them is done
      rank that read it
    F of a stage that feeds  its own I, which is a message that no link carries
      nobody

That is how a program sends (`schedule/topology.py`), so skips and shared outputs take their time on the links here
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule.action import Op
from penstock.schedule.builders.problem import OPS, ROUNDING, Orders, schedule_of
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs, memory_by_op
from penstock.schedule.topology import Topology, links

__all__ = ["Instance", "Message", "Orders"]


class Message(NamedTuple):
    """What leaves when `makers` actions of a microbatch have run. A place is a stage, for I `stages` higher."""

    number: int
    makers: int
    readers: tuple[int, ...]  # places
    way: int  # number of the ordered pair of ranks; -1 on one rank
    occupied: float
    delay: float


class Instance:
    """One placement and topology under costs, with a cap for each rank.

    x: the number of an action
    time[x]     how long it takes       takes[x]  memory that it adds for good; below 0, gives back
    room[x]     what must be free       sent[place]  the messages that an F or I is a maker of
    awaited[place]  the number of messages that an F or I reads
    """

    def __init__(
        self,
        placement: Placement,
        topology: Topology,
        microbatches: int,
        costs: Costs,
        caps: Sequence[float],
        recompute: frozenset[int] = frozenset(),
    ) -> None:
        self.placement, self.topology, self.microbatches, self.costs = placement, topology, microbatches, costs
        self.ranks, self.stages, self.recompute = placement.ranks, placement.stages, recompute
        self.size = self.stages * microbatches
        self.home = placement.by_stage
        self.owned = [placement.stages_of(rank) for rank in range(self.ranks)]
        self.inputs = [[self.stages + stage for stage in stages] for stages in self.owned]  # places
        self.readers = self.home * 2  # the rank of each place
        self.caps = [cap * (1 + ROUNDING) for cap in caps]
        costs.check_edges(topology)
        self.scale = costs.scale(microbatches)
        forward, _, backward, weight = costs.recomputed(self.stages, recompute).by_op(self.stages)
        self.forward = forward
        self.time = self._spread([*forward, *backward, *weight])
        amount, per_stage = sum(self.scale), [*map(sum, zip(forward, backward, weight, strict=True))]
        self.work = [amount * sum(per_stage[stage] for stage in stages) for stages in self.owned]  # of each rank
        memory = memory_by_op(costs, self.stages, recompute)
        needs = [memory[op][stage] for op in OPS for stage in range(self.stages)]
        self.room = self._spread([room for room, _ in needs])
        self.takes = self._spread([change for _, change in needs])
        self.spare = [max(0.0, *(memory[Op.I][stage][0] for stage in stages)) for stages in self.owned]
        self.sent: list[list[Message]] = [[] for _ in range(2 * self.stages)]
        self.awaited = [0] * (2 * self.stages)
        self.messages: list[Message] = []
        self.ways = 0
        self._post()
        self.rest = [0.0] * (
            2 * self.stages
        )  # by place, of size 1: what a microbatch's way takes from there to its end
        for place in (*range(self.stages, 2 * self.stages), *reversed(range(self.stages))):
            after = [m.occupied + m.delay + self.rest[reader] for m in self.sent[place] for reader in m.readers]
            self.rest[place] = (*forward, *backward)[place] + max(after, default=0.0)

    def _spread(self, by_place: Sequence[float]) -> list[float]:
        if len(set(self.scale)) == 1:
            return [value * self.scale[0] for value in by_place for _ in self.scale]
        return [value * scale for value in by_place for scale in self.scale]

    def _post(self) -> None:
        stages = self.stages
        ways: dict[tuple[int, int], int] = {}
        joined = {(link.source, target) for link in links(self.placement, self.topology) for target in link.targets}
        for link in links(self.placement, self.topology):
            here, there = link.source_rank, link.target_rank
            price = max(self.costs.wire(link.source, target, (here, there)) for target in link.targets)
            back = max(self.costs.wire(link.source, target, (there, here)) for target in link.targets)
            ahead = ways.setdefault((here, there), len(ways))
            self._add([link.source], link.targets, ahead, *price)
            behind = ways.setdefault((there, here), len(ways))
            self._add([stages + target for target in link.targets], (stages + link.source,), behind, *back)
        for source, target in self.topology.edges:
            if (source, target) not in joined:
                self._add([source], (target,))
                self._add([stages + target], (stages + source,))
        for stage in range(stages):
            if not self.topology.consumers(stage):
                self._add([stage], (stages + stage,))
        self.ways = len(ways)

    def _add(
        self, makers: list[int], readers: tuple[int, ...], way: int = -1, occupied: float = 0.0, delay: float = 0.0
    ) -> None:
        message = Message(len(self.messages), len(makers), readers, way, occupied, delay)
        self.messages.append(message)
        for maker in makers:
            self.sent[maker].append(message)
        for reader in readers:
            self.awaited[reader] += 1

    # -- what any order needs

    @property
    def lack(self) -> float:
        """The memory that a rank lacks for the largest microbatch alone, when it has passed all stages; 0 if none does.

        Of ranks that lack some, the one that lacks most.
        """
        largest = max(range(self.microbatches), key=self.scale.__getitem__)
        held = [sum(self.takes[stage * self.microbatches + largest] for stage in stages) for stages in self.owned]
        spare = [spare * self.scale[largest] for spare in self.spare]
        return max(0.0, *(size + more - cap for size, more, cap in zip(held, spare, self.caps, strict=True)))

    # -- to actions

    def schedule(self, orders: Orders, name: str = "auto") -> Schedule:
        """The aligned schedule of complete orders."""
        return schedule_of(orders, self.placement, self.topology, self.microbatches, self.recompute, name)
