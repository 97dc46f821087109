"""One placement under costs by stage and a cap for each rank, as flat arrays of whole numbers.

A search looks at thousands of orders, so an action is one whole number here and everything about it is one look-up.
With S stages and M microbatches, and `size` for S * M,

    0 ... size - 1           F of stage number // M, microbatch number % M
    size ... 2 * size - 1    I, in the same way
    2 * size and on          W, in the same way

so an action that stands `size` lower is the one of the same stage and microbatch that must come before it on its own
rank. A *place* is number // M: a stage for F, `stages` higher for I, twice that for W.

What an F or I sets free elsewhere is a list of messages, each with the computes that must have run before it leaves and
those that read it, as a program sends them (`schedule/topology.py`):

    F of a stage             one message to each rank that reads its output
    I of the stages of one   one message to the producer: the sum of their gradients, when the last of them is done
      rank that read it
    F of a stage that feeds  its own I, which is a message that no link carries
      nobody

On a chain each feeds exactly one other: `feeds` and `wires` have that, without a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, repeat
from operator import add
from typing import Any, Literal, NamedTuple

from penstock.rules import check_count
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.columns import Columns
from penstock.schedule.lowering.align import align
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs, memory_by_op
from penstock.schedule.topology import Topology, links

ROUNDING = 1e-9  # relative: sums of thirds
MORE = 1.3  # W than the shortest way takes are kept for the time between two steps
LARGE = 100_000  # computes; from here on a rule takes the better part of a second
Objective = Literal["makespan", "span", "steady"]
Orders = list[list[int]]  # By rank: its actions in order, as numbers.
OPS = (Op.F, Op.I, Op.W)
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


class Message(NamedTuple):
    """What leaves when `makers` computes of a microbatch have run."""

    number: int
    makers: int
    readers: tuple[int, ...]  # places
    link: int  # number of the ordered pair of ranks; -1 on one rank
    occupied: float  # time on the link, of a microbatch of size 1
    delay: float  # after that


class Problem:
    """What a search orders.

    x: the number of an action
    time[x]   how long it takes        wires[x]   (time on the link, delay after that, link) of what it makes
    feeds[x]  whom it feeds; -1 for    takes[x]   memory that it adds, below 0 where it gives back
              nobody, -2 for several   room[x]    memory that must be free for it

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
        topology: Topology | None = None,
        objective: Objective = "makespan",
        recompute: frozenset[int] = frozenset(),
    ) -> None:
        self.placement, self.microbatches, self.costs, self.objective = placement, microbatches, costs, objective
        self.ranks, self.stages, self.recompute = placement.ranks, placement.stages, recompute
        self.size = self.stages * microbatches
        self.owned = [placement.stages_of(rank) for rank in range(self.ranks)]
        self.memory = tuple(caps)
        self.caps = [cap * (1 + ROUNDING) for cap in caps]
        self.topology = Topology.chain(self.stages) if topology is None else topology
        costs.check_edges(self.topology)
        self.scale = costs.scale(microbatches)
        self.alike = len(set(self.scale)) == 1
        forward, _, backward, weight = costs.recomputed(self.stages, recompute).by_op(self.stages)
        self.lengths = [*forward, *backward, *weight]  # By place, of a microbatch of size 1.
        self._count_memory()
        work = [sum(times) * sum(self.scale) / microbatches for times in zip(forward, backward, weight, strict=True)]
        self.busiest = max(sum(work[stage] for stage in stages) for stages in self.owned)  # for a mean microbatch

    def _count_memory(self) -> None:
        forward, _, backward, _ = memory_by_op(self.costs, self.stages, self.recompute)
        self.held = self.costs.per_stage("held", self.stages)
        self.most = tuple(size for size, _ in forward)
        self.input_room = [room for room, _ in backward]
        largest = max(self.scale)
        self.spare = [largest * max(0.0, *(self.input_room[stage] for stage in stages)) for stages in self.owned]
        self._given_back = [-held for held in self.held]

    def but(self, **changes: Any) -> Problem:
        """Return the same with other microbatches, costs or caps."""
        same = {"topology": self.topology, "objective": self.objective, "recompute": self.recompute}
        facts: dict[str, Any] = {"microbatches": self.microbatches, "costs": self.costs, "caps": self.memory, **same}
        return Problem(self.placement, **{**facts, **changes})

    @cached_property
    def even(self) -> Problem:
        """The same with all stages as long as they are on average, in the same memory; itself where they are."""
        names = ("forward", "input", "weight")
        times = {name: self.costs.per_stage(name, self.stages) for name in names}
        if all(len(set(each)) == 1 for each in times.values()):
            return self
        means: dict[str, Any] = {name: sum(each) / self.stages for name, each in times.items()}
        return self.but(costs=replace(self.costs, **means))

    # -- by the number of an action; made when they are asked for, because of some placements the bound says enough

    @cached_property
    def time(self) -> list[float]:
        """How long each action takes."""
        return self._spread(self.lengths)

    @cached_property
    def takes(self) -> list[float]:
        """The memory that each action adds."""
        after = [held - most for held, most in zip(self.held, self.most, strict=True)]
        return self._spread([*self.most, *after, *self._given_back])

    @cached_property
    def room(self) -> list[float]:
        """The memory that must be free for each action while orders are made."""
        least = self.least_room
        if not any(self.spare):
            return least
        spare = (self.spare[rank] for rank in self.placement.by_stage for _ in range(self.microbatches))
        return [*map(add, least, spare), *least[self.size :]]

    @cached_property
    def least_room(self) -> list[float]:
        """The memory that must be free for each action of a whole order."""
        return self._spread([*self.most, *self.input_room, *self._given_back])

    def _spread(self, by_place: Sequence[float]) -> list[float]:
        if self.alike:
            return [each for value in by_place for each in repeat(value * self.scale[0], self.microbatches)]
        return [value * scale for value in by_place for scale in self.scale]

    # -- messages

    @cached_property
    def sent(self) -> list[list[Message]]:
        """The messages that the F or I of a place is a maker of."""
        return self._messages[0]

    @cached_property
    def awaited(self) -> list[int]:
        """How many messages the F or I of a place reads."""
        return self._messages[1]

    @cached_property
    def messages(self) -> list[Message]:
        """All of them, by number."""
        return list({message.number: message for sent in self.sent for message in sent}.values())

    @cached_property
    def _messages(self) -> tuple[list[list[Message]], list[int]]:
        stages, topology = self.stages, self.topology
        sent: list[list[Message]] = [[] for _ in range(2 * stages)]
        awaited = [0] * (2 * stages)
        ways: dict[tuple[int, int], int] = {}
        count = 0

        def send(
            makers: Sequence[int], readers: tuple[int, ...], way: tuple[int, int] | None, wire: Any = (0, 0)
        ) -> None:
            nonlocal count
            link = -1 if way is None else ways.setdefault(way, len(ways))
            for maker in makers:
                sent[maker].append(Message(count, len(makers), readers, link, *wire))
            for reader in readers:
                awaited[reader] += 1
            count += 1

        carried = set()
        for source, _, here, there, targets in links(self.placement, topology):
            carried |= {(source, target) for target in targets}
            ahead = max(self.costs.wire(source, target, (here, there)) for target in targets)
            back = max(self.costs.wire(source, target, (there, here)) for target in targets)
            send([source], targets, (here, there), ahead)
            send([stages + target for target in targets], (stages + source,), (there, here), back)
        for source, target in topology.edges:
            if (source, target) not in carried:
                send([source], (target,), None)
                send([stages + target], (stages + source,), None)
        for stage in range(stages):
            if not topology.consumers(stage):
                send([stage], (stages + stage,), None)
        return sent, awaited

    @cached_property
    def _simple(self) -> list[Message | None]:
        """By place, the message that is its only one, has no other maker, and is all that its reader awaits."""
        return [
            sent[0]
            if len(sent) == 1 and sent[0].makers == len(sent[0].readers) == self.awaited[sent[0].readers[0]] == 1
            else None
            for sent in self.sent
        ]

    @cached_property
    def feeds(self) -> list[int]:
        """Whom each action feeds: -1 for nobody; -2 for several, or for somebody who awaits more."""
        count, found = self.microbatches, list[int]()
        for sent, simple in zip(self.sent, self._simple, strict=True):
            if simple is not None:
                found += range(simple.readers[0] * count, (simple.readers[0] + 1) * count)
            else:
                found += repeat(-2 if sent else -1, count)
        return found + [-1] * self.size

    @cached_property
    def wires(self) -> list[tuple[float, float, int]]:
        """Time on the link, delay after that, and the link, of what each action makes; of several, without meaning."""
        found: list[tuple[float, float, int]] = []
        for simple in self._simple:
            _, _, _, link, occupied, delay = simple or Message(0, 0, (), -1, 0.0, 0.0)
            if occupied and not self.alike:
                found += [(occupied * scale, delay, link) for scale in self.scale]
            else:
                found += repeat((occupied * self.scale[0], delay, link), self.microbatches)
        return found

    @cached_property
    def at_first(self) -> list[float]:
        """When the input of each action is there: 0 if it comes from nowhere else, below 0 if it is to be made."""
        found = [each for awaited in self.awaited for each in repeat(-1.0 if awaited else 0.0, self.microbatches)]
        return found + [0.0] * self.size

    # -- what any order needs

    def least_memory(self, rank: int) -> float:
        """Return what the largest microbatch holds on a rank when it has passed all stages."""
        return sum(self.most[stage] for stage in self.owned[rank]) * max(self.scale) + self.spare[rank]

    @property
    def lack(self) -> float:
        """The memory that a rank lacks for the largest microbatch alone; of those that lack some, the most."""
        return max(0.0, *(self.least_memory(rank) - cap for rank, cap in enumerate(self.caps)))

    @cached_property
    def between(self) -> list[int]:
        """How many W each rank should keep for the time between two steps that overlap, until its next F is there.

        Its last I is of its first stage. From there the gradient goes to the first stage, and the first forward of the
        next step comes from there.
        """
        hops = [sum(sum(message[4:]) for message in sent) for sent in self.sent]
        ways = [sum(self.lengths[p] + hops[p] for p in (stage, self.stages + stage)) for stage in range(self.stages)]
        found = []
        for owned in self.owned:
            first, weight = owned[0], sum(self.lengths[2 * self.stages + stage] for stage in owned) / len(owned)
            way = sum(ways[:first]) + hops[self.stages + first]
            found.append(round(MORE * way / weight) if weight else 0)
        return found

    # -- to and from actions

    def numbers(self, rows: Sequence[Sequence[Action]]) -> Orders:
        """Turn a builder's rows into numbers; a full backward is its two halves, which is never slower."""
        count, half, full = self.microbatches, self.size, Op.B
        offsets = {Op.F: 0, Op.B: half, Op.I: half, Op.W: 2 * half}
        found: Orders = []
        for row in rows:
            order: list[int] = []
            for action in row:
                for stage, op, microbatch, _, _ in (action,) if action.pair is None else action.parts():
                    x = stage * count + microbatch + offsets[op]
                    order.append(x)
                    if op is full:
                        order.append(x + half)
            found.append(order)
        return found

    def action(self, x: int) -> Action:
        """Return the action of a number."""
        third, x = divmod(x, self.size)
        stage, microbatch = divmod(x, self.microbatches)
        return trusted(stage, OPS[third], microbatch)

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """Make the aligned schedule of complete orders, without an object for each action."""
        import numpy as np

        lengths = tuple(map(len, orders))
        starts = np.array([0, *accumulate(lengths)])
        numbers = np.fromiter(chain.from_iterable(orders), dtype=np.int64, count=int(starts[-1]))
        third, rest = np.divmod(numbers, self.size)
        stage, microbatch = (part.astype(np.int32) for part in np.divmod(rest, self.microbatches))
        position = (np.arange(len(numbers)) - np.repeat(starts[:-1], lengths)).astype(np.int32)
        op, peer = np.array(OPS, dtype=np.int8)[third], np.full(len(numbers), -1, dtype=np.int32)
        return align(
            Schedule(
                Columns(lengths, starts, position, stage, op, microbatch, peer),
                placement=self.placement,
                microbatches=self.microbatches,
                topology=self.topology,
                forward_only=False,
                recompute=self.recompute,
                name=name,
                passes=(),
            )
        )
