"""An order made by running the pipeline with its true times: each rank takes the best of what is there.

`search/dispatch.py` does this for stages in a chain and microbatches that are all alike. Here any topology is run,
every microbatch has its own times and memory, and links may queue, so the clock is the true one and the W are placed
on the way: the end of the run is the value of the order, and nothing is priced twice.

The microbatches come in a given sequence, which is one of the things to choose: a large one that comes last is
waited for by everybody. Among what has arrived at a rank, a lower place in the sequence goes first.

Memory: of the microbatches that have not passed all of a rank's stages, the first in the sequence has its memory
reserved. With microbatches of one size this cannot get stuck (`search/dispatch.py` says why). With sizes that differ
it can, under a tight cap; then there is no order, and the caller has others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.tools.search.uneven.instance import Instance, Orders

__all__ = ["Habit", "Outcome", "run"]

EPSILON = 1e-9


class Habit(NamedTuple):
    """What a rank prefers."""

    turn: str = "alternate"  # whose turn it is when both kinds are there: alternate | forward | input
    forward: str = "deep"  # which stage's F goes first: deep | shallow | old
    input: str = "deep"
    patience: float = 0.0  # how long to wait for the kind whose turn it is, in mean forwards
    overrun: float = 0.3  # the share of a W by which it may make others wait
    ahead: float = math.inf  # how many microbatches a rank's first stage may run ahead of its last
    haste: float = (
        math.inf
    )  # the share of the limit after which the way of a microbatch may not end: else it goes first


class Outcome(NamedTuple):
    """Complete orders, and when the last rank is done."""

    value: float
    orders: Orders


def run(instance: Instance, sequence: Sequence[int], habit: Habit, limit: float = math.inf) -> Outcome | None:
    """The orders that a habit makes; None where memory does not let them end, or if they cannot end by `limit`."""
    state = _State(instance, sequence, habit, limit)
    events, free, work, step = state.events, state.free, state.work, state.step
    while events:
        time, rank = heappop(events)
        if free[rank] <= time + EPSILON:
            if time + work[rank] > limit:
                return None
            step(rank, time)
    if sum(map(len, state.orders)) < 3 * instance.size:
        return None
    return Outcome(max(free), state.orders)


class _State:
    """One run. `queues` hold what has arrived, by its turn in the sequence; `coming` what is on its way."""

    def __init__(self, instance: Instance, sequence: Sequence[int], habit: Habit, limit: float) -> None:
        stages, ranks, count = instance.stages, instance.ranks, instance.microbatches
        self.instance, self.habit, self.sequence = instance, habit, sequence
        self.count, self.stages, self.time, self.takes = count, stages, instance.time, instance.takes
        self.turn = [0] * count  # place in the sequence
        for place, microbatch in enumerate(sequence):
            self.turn[microbatch] = place
        self.patience = habit.patience * sum(instance.time[: instance.size]) / instance.size
        self.gap, self.late = 1 - habit.overrun, habit.haste * limit
        self.queues: list[list[int]] = [[] for _ in range(2 * stages)]  # heaps of turns, by place
        self.coming: list[list[tuple[float, int, int]]] = [[] for _ in range(ranks)]  # (arrival, place, turn)
        self.missing = [instance.awaited[place] for place in range(2 * stages) for _ in range(count)]
        self.arrived = [0.0] * (2 * instance.size)
        self.unmade = [message.makers for message in instance.messages for _ in range(count)]
        self.busy_until = [0.0] * instance.ways
        self.owed: list[deque[int]] = [deque() for _ in range(ranks)]
        self.held, self.free = [0.0] * ranks, [0.0] * ranks
        self.was_input = [True] * ranks
        self.passed = [0] * ranks  # how many of the sequence have passed all stages of the rank
        self.done = [0] * (ranks * count)  # stages of the rank that a microbatch has passed
        self.spare = [spare * max(instance.scale) for spare in instance.spare]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.work = list(instance.work)  # that each rank has still to do
        for stage in range(stages):
            if not instance.awaited[stage]:
                self.queues[stage] = list(range(count))
        self.events = [(0.0, rank) for rank in range(ranks)]

    def step(self, rank: int, now: float) -> None:
        """Let a free rank run one action, if there is one to run."""
        coming, queues = self.coming[rank], self.queues
        while coming and coming[0][0] <= now + EPSILON:
            _, place, turn = heappop(coming)
            heappush(queues[place], turn)
        turn_of, owed = self.habit.turn, self.owed[rank]
        owned: Sequence[int] = self.instance.owned[rank]
        inputs: Sequence[int] = self.instance.inputs[rank]
        forward_turn = turn_of == "forward" or (turn_of == "alternate" and self.was_input[rank])
        until = math.inf
        if self.late < math.inf:
            late, until = self._late(rank, now)
            if late >= 0:
                forward_turn = late < self.stages
                owned, inputs = ([late], inputs) if forward_turn else (owned, [late])
        forward, blocked = self._forward(rank, owned)
        forward = self._in_time(forward, now, until)
        if forward_turn and forward >= 0:
            self._run(rank, now, forward)
        elif forward_turn and blocked and owed:
            self._do(rank, now, owed.popleft())
        elif (backward := self._in_time(self._input(inputs), now, until)) >= 0:
            if owed and self.held[rank] + self.instance.room[self._first(backward)] > self.instance.caps[rank]:
                self._do(rank, now, owed.popleft())
            else:
                self._run(rank, now, backward)
        elif forward >= 0 and not (self.patience and not forward_turn and self._next_input(rank) - now < self.patience):
            self._run(rank, now, forward)
        elif owed and forward < 0:
            soon = coming[0][0] - now if coming else math.inf
            if blocked or soon >= self.gap * self.time[owed[0]] - EPSILON:
                self._do(rank, now, owed.popleft())

    def _late(self, rank: int, now: float) -> tuple[int, float]:
        """The place of what must run now lest all end late, or -1; and when something comes that must then run."""
        rest, scale, sequence = self.instance.rest, self.instance.scale, self.sequence
        latest, found, until = self.late, -1, math.inf
        for place in (*self.instance.owned[rank], *self.instance.inputs[rank]):
            if self.queues[place]:
                end = now + rest[place] * scale[sequence[self.queues[place][0]]]
                if end > latest:
                    latest, found = end, place
        for arrival, place, turn in self.coming[rank]:
            if arrival < until and arrival + rest[place] * scale[sequence[turn]] > latest:
                until = arrival
        if found >= 0 and now + self.time[self._first(found)] <= until + EPSILON:
            return found, math.inf
        return -1, until

    def _in_time(self, place: int, now: float, until: float) -> int:
        """The place, if what is there would end by then; else -1."""
        late = place >= 0 and until < math.inf and now + self.time[self._first(place)] > until + EPSILON
        return -1 if late else place

    def _first(self, place: int) -> int:
        """The number of the first action that is there at a place."""
        return place * self.count + self.sequence[self.queues[place][0]]

    def _next_input(self, rank: int) -> float:
        return min((arrival for arrival, place, _ in self.coming[rank] if place >= self.stages), default=math.inf)

    def _input(self, places: Sequence[int]) -> int:
        """The place of the I to run, of these, or -1."""
        queues = self.queues
        there = [place for place in places if queues[place]]
        return self._pick(there, self.habit.input) if there else -1

    def _forward(self, rank: int, stages: Sequence[int]) -> tuple[int, bool]:
        """The place of the F to run, of these, or -1; and whether memory forbids one that is there."""
        queues, sequence, count, takes = self.queues, self.sequence, self.count, self.takes
        owned = self.instance.owned[rank]
        there = [stage for stage in stages if queues[stage]]
        if not there:
            return -1, False
        oldest, ahead = self.passed[rank], self.habit.ahead
        room = self.instance.caps[rank] - self.held[rank] - self.spare[rank]
        first = sequence[oldest] if oldest < count else 0
        reserved = 0.0
        if room < math.inf:
            for stage in owned[self.done[rank * count + first] :]:
                reserved += takes[stage * count + first]
        allowed, blocked = [], False
        for stage in there:
            turn = queues[stage][0]
            if turn - oldest >= ahead and stage != owned[-1]:
                continue
            if takes[stage * count + sequence[turn]] + (0.0 if turn == oldest else reserved) <= room:
                allowed.append(stage)
            else:
                blocked = True
        return (self._pick(allowed, self.habit.forward) if allowed else -1), blocked

    def _pick(self, places: list[int], how: str) -> int:
        if len(places) == 1 or how == "shallow":
            return places[0]
        if how == "deep":
            return places[-1]
        return min(places, key=lambda place: self.queues[place][0])

    def _run(self, rank: int, now: float, place: int) -> None:
        """Run the F or I of a place, and send on what is complete with it."""
        instance, count = self.instance, self.count
        microbatch = self.sequence[heappop(self.queues[place])]
        x = place * count + microbatch
        end = self._do(rank, now, x)
        if place >= self.stages:
            self.was_input[rank] = True
            self.owed[rank].append(x + instance.size)
        else:
            self.was_input[rank] = False
            self._pass(rank, microbatch)
        for number, makers, readers, way, occupied, delay in instance.sent[place]:
            if makers > 1:
                self.unmade[number * count + microbatch] -= 1
                if self.unmade[number * count + microbatch]:
                    continue
            arrival = end
            if occupied:
                arrival = max(end, self.busy_until[way]) + occupied * instance.scale[microbatch]
                self.busy_until[way] = arrival
            arrival += delay
            for reader in readers:
                y = reader * count + microbatch
                self.arrived[y] = latest = max(arrival, self.arrived[y])
                self.missing[y] -= 1
                if not self.missing[y]:
                    there = instance.readers[reader]
                    heappush(self.coming[there], (latest, reader, self.turn[microbatch]))
                    if latest >= self.free[there]:
                        heappush(self.events, (latest, there))

    def _pass(self, rank: int, microbatch: int) -> None:
        count, stages = self.count, len(self.instance.owned[rank])
        self.done[rank * count + microbatch] += 1
        oldest = self.passed[rank]
        while oldest < count and self.done[rank * count + self.sequence[oldest]] == stages:
            oldest += 1
        self.passed[rank] = oldest

    def _do(self, rank: int, now: float, x: int) -> float:
        time = self.time[x]
        end = now + time
        self.work[rank] -= time
        self.held[rank] += self.takes[x]
        self.orders[rank].append(x)
        self.free[rank] = end
        heappush(self.events, (end, rank))
        return end
