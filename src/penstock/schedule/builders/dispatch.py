"""Orders made by running the pipeline: a rank that is free takes what has priority, of what is there and fits.

This is list scheduling: rules differ in the priorities, in how long a rank waits for what would go first, and in the
times of the clock. The clock need not tell the true times: an order that is right under slightly different costs (all
weight gradients short, hops free) is often better under the true ones than the order that those would give, since a
greedy choice at a true tie breaker's mercy makes an uneven pattern that repeats. So the order of F and I is what
matters; `filling.py` prices it with the true times and places W anew. Where the clock is true, so are the W in it.

Why a rule that reserves memory never gets stuck, whatever its priorities: of the microbatches that have not passed all
of a rank's stages, the first has its remaining memory reserved; any other may take only what is left beside that. So
the first always can go forward on every rank, then backward, which needs no memory (or what forwards leave alone for
recomputing, once the W that are owed have run), and then its W gives back at least what the next one needs. With
microbatches that differ, under a tight cap, it can get stuck; then there is no order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.schedule.builders.problem import Message, Orders, Problem

EPSILON = 1e-9
NEVER = math.inf
LAST = 1e15  # added to the key of what goes after all others


class Keys(NamedTuple):
    """Priorities as numbers, the lowest first: that of a place, and that of a turn among the microbatches, added up.

    A stage never holds more microbatches than its quota. With `strict` priorities, a rank waits for what goes first
    among its forwards, and among its input backwards, even if others are there. `starts` is the time between two
    microbatches at which the first stage may start them.
    """

    places: Sequence[float]
    forward: Sequence[float]  # by turn
    input: Sequence[float]  # by turn
    quotas: Sequence[int] | None = None  # by stage
    strict: bool = False
    reserve: bool = True
    starts: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a rank chooses, and the clock by which it sees what is there."""

    turn: str = "alternate"  # what goes first: "forward", "input", in turns ("alternate"), or by "key" alone
    patience: float = 0.0  # how long to wait for what goes first, in forwards
    overrun: float = 0.0  # the share of a W by which it may make the next action late
    memory: float = 1.0  # the share of the caps to use
    input_time: float = 1.0  # the clock, in true I, W and hops
    weight_time: float = 1.0
    hop_time: float = 1.0
    equal: bool = False  # the clock: all stages take as long as they do on average

    def keys(self, problem: Problem) -> Keys:
        """Return the priorities for a problem."""
        raise NotImplementedError

    def rooms(self, problem: Problem) -> list[float]:
        """Return the memory that each rank may use for forwards."""
        least = [problem.least_memory(rank) * (1 + EPSILON) for rank in range(problem.ranks)]
        caps = [max(cap * self.memory, min(cap, low)) for cap, low in zip(problem.caps, least, strict=True)]
        return [cap - spare for cap, spare in zip(caps, problem.spare, strict=True)]


class Run(NamedTuple):
    """Complete orders, and when the last rank was done by the rule's clock."""

    orders: Orders
    end: float


def dispatch(problem: Problem, rule: Rule, sequence: Sequence[int] | None = None) -> Run | None:
    """Run the pipeline under a rule; None where memory does not let it end.

    `sequence` is the order in which the microbatches go through every stage, if it is not that of their numbers.
    """
    problem = problem.even if rule.equal else problem
    run = _Dispatch(problem, rule, range(problem.microbatches) if sequence is None else sequence)
    events, free, step = run.events, run.free, run.step
    while events:
        now, rank = heappop(events)
        if free[rank] <= now + EPSILON:
            step(rank, now)
    return Run(run.orders, max(free)) if sum(run.done) == 2 * problem.size else None


class _Dispatch:
    """The state of one run.

    done[place]       how many microbatches have had their turn there
    arrivals[place]   when the input of the first, second, ... microbatch was there, as far as it is made
    owed[rank]        numbers of the W that are still to run
    """

    def __init__(self, problem: Problem, rule: Rule, sequence: Sequence[int]) -> None:
        ranks, stages, count = problem.ranks, problem.stages, problem.microbatches
        self.problem, self.rule, self.sequence, self.count, self.stages = problem, rule, sequence, count, stages
        self.keys = keys = rule.keys(problem)
        self.turns = [keys.forward] * stages + [keys.input] * stages
        self.places = [(*owned, *(stages + stage for stage in owned)) for owned in problem.owned]
        halves = ((row[: len(row) // 2], row[len(row) // 2 :]) for row in self.places)
        self.lines = [[*map(self._in_line, half)] for half in halves] if keys.strict else []
        self.home = problem.placement.by_stage * 2
        self.patience = rule.patience * sum(problem.time[: problem.size]) / problem.size
        self.gap = (1 - rule.overrun) * rule.weight_time  # the share of a true W that a gap must have
        self.done, self.free, self.held = [0] * (2 * stages), [0.0] * ranks, [0.0] * ranks
        self.in_flight = [0] * stages  # from F to W
        self.was_input = [True] * ranks
        self.owed: list[deque[int]] = [deque() for _ in range(ranks)]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.room = rule.rooms(problem)
        self.caps = [room + spare for room, spare in zip(self.room, problem.spare, strict=True)]
        # by place that awaits several messages, and microbatch: how many are left, and when the last so far is there
        self.missing = {place: [(each, 0.0)] * count for place, each in enumerate(problem.awaited) if each > 1}
        self.unmade = {message.number: [message.makers] * count for message in problem.messages if message.makers > 1}
        self.links: dict[int, float] = {}
        self.arrivals: list[list[float]] = [[] for _ in range(2 * stages)]
        self.events = [(0.0, rank) for rank in range(ranks)]
        for stage in range(stages):
            if not problem.awaited[stage]:
                self.arrivals[stage] = [turn * keys.starts for turn in range(count)]
                self.events += [(start, self.home[stage]) for start in self.arrivals[stage] if start]

    def step(self, rank: int, now: float) -> None:
        """Let a free rank run what goes first, unless it waits for something better; or a W, or nothing."""
        first, first_key, full, full_key, soon, soon_key = self._choose(rank, now)
        owed = self.owed[rank]
        if full_key < first_key and owed:
            self._run_weight(rank, now, full)
        elif first >= 0 and soon_key >= first_key:
            self._run(rank, now, first)
        elif owed and soon >= self.gap * self.problem.time[owed[0]] - EPSILON:
            self._run_weight(rank, now)

    def _choose(self, rank: int, now: float) -> tuple[int, float, int, float, float, float]:
        """Choose from what is there, and see what is coming.

        Return the place that goes first of what fits, or -1, and its key; the same of what does not fit; in what time
        the next one will be there; and the first key of what will be there before the rank's patience ends.
        """
        first, first_key, full, full_key, soon, soon_key = -1, NEVER, -1, NEVER, NEVER, NEVER
        stages, done, arrivals, turns, quotas = self.stages, self.done, self.arrivals, self.turns, self.keys.quotas
        base, takes, patience = self.keys.places, self.problem.takes, self.patience
        forward_later, input_later = self._penalties(rank)
        room, oldest, reserved = self._room(rank)
        for place in [line[-1] for line in self.lines[rank] if line] if self.keys.strict else self.places[rank]:
            turn = done[place]
            if turn >= len(arrivals[place]):
                continue
            wait, key = arrivals[place][turn] - now, base[place] + turns[place][turn]
            x = place * self.count + self.sequence[turn]
            if place < stages:
                key += forward_later
                fits = takes[x] + (reserved if turn != oldest else 0.0) <= room
                fits = fits and (quotas is None or self.in_flight[place] < quotas[place])
            else:
                key += input_later
                fits = self.held[rank] + self.problem.least_room[x] <= self.caps[rank] or not self.owed[rank]
            if not fits:
                if wait <= EPSILON and key < full_key:
                    full, full_key = place, key
            elif wait <= EPSILON:
                if key < first_key:
                    first, first_key = place, key
            else:
                soon = min(soon, wait)
                if wait < patience and key < soon_key:
                    soon_key = key
        return first, first_key, full, full_key, soon, soon_key

    def _penalties(self, rank: int) -> tuple[float, float]:
        """Return what is added to the keys of forwards and of input backwards, because of whose turn it is."""
        turn = self.rule.turn
        if turn == "key":
            return 0.0, 0.0
        return (0.0, LAST) if turn == "forward" or (turn == "alternate" and self.was_input[rank]) else (LAST, 0.0)

    def _in_line(self, places: Sequence[int]) -> list[int]:
        """Return the places, once for each turn, in the order of their keys, the first one last."""
        base, turns, count = self.keys.places, self.turns, self.count
        keyed = [(base[place] + turns[place][turn], place) for place in places for turn in range(count)]
        return [place for _, place in sorted(keyed, reverse=True)]

    def _room(self, rank: int) -> tuple[float, int, float]:
        """Return the room for forwards, the first microbatch's turn that has not passed, and what that still needs."""
        owned, room = self.problem.owned[rank], self.room[rank] - self.held[rank]
        if room == NEVER or not self.keys.reserve:
            return room, -1, 0.0
        oldest = self.done[owned[-1]]
        if oldest == self.count:
            return room, oldest, 0.0
        microbatch, takes, count = self.sequence[oldest], self.problem.takes, self.count
        left = [takes[stage * count + microbatch] for stage in owned if self.done[stage] <= oldest]
        return room, oldest, sum(left)

    def _run(self, rank: int, now: float, place: int) -> None:
        """Run the F or I of a place, and send on what is complete with it."""
        problem, microbatch = self.problem, self.sequence[self.done[place]]
        self.done[place] += 1
        x = place * self.count + microbatch
        self.was_input[rank] = is_input = place >= self.stages
        if self.keys.strict:
            self.lines[rank][is_input].pop()
        end = now + problem.time[x] * (self.rule.input_time if is_input else 1.0)
        self.held[rank] += problem.takes[x]
        self.orders[rank].append(x)
        if is_input:
            self.owed[rank].append(x + problem.size)
        else:
            self.in_flight[place] += 1
        for message in problem.sent[place]:
            if message.makers > 1:
                self.unmade[message.number][microbatch] -= 1
                if self.unmade[message.number][microbatch]:
                    continue
            self._deliver(message, microbatch, end)
        self._busy(rank, end)

    def _deliver(self, message: Message, microbatch: int, end: float) -> None:
        """Tell all who read a message when it arrives."""
        _, _, readers, link, occupied, delay = message
        if link >= 0:
            occupied *= self.problem.scale[microbatch] * self.rule.hop_time
            if occupied:
                end = self.links[link] = max(end, self.links.get(link, 0.0)) + occupied
            end += delay * self.rule.hop_time
        for place in readers:
            there = end
            if place in self.missing:
                left, before = self.missing[place][microbatch]
                there = max(before, end)
                self.missing[place][microbatch] = left - 1, there
                if left > 1:
                    continue
            self.arrivals[place].append(there)
            reader = self.home[place]
            if there >= self.free[reader]:  # Otherwise it looks when it is free.
                heappush(self.events, (there, reader))

    def _run_weight(self, rank: int, now: float, full: int = -1) -> None:
        """Run the oldest W that the rank owes, or the oldest of a stage that holds its quota."""
        owed, x = self.owed[rank], self.owed[rank][0]
        if self.keys.quotas is not None and 0 <= full < self.stages:
            first = (2 * self.stages + full) * self.count
            x = next((other for other in owed if first <= other < first + self.count), x)
        owed.remove(x)
        self.held[rank] += self.problem.takes[x]
        self.in_flight[x // self.count - 2 * self.stages] -= 1
        self.orders[rank].append(x)
        self._busy(rank, now + self.problem.time[x] * self.rule.weight_time)

    def _busy(self, rank: int, end: float) -> None:
        self.free[rank] = end
        heappush(self.events, (end, rank))
