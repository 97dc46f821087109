"""The clock that orders are made by: when ranks are free, what has arrived, and what memory holds.

Three ways of making orders run the pipeline on this clock and differ only in what a free rank takes next: `grouped`,
`rhythm` and `wave`. A run may end with ranks that wait for memory for good; it then has no order.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from penstock.schedule.builders.problem import Orders, Problem

EPSILON = 1e-9
NEVER = math.inf


class Clocked(ABC):
    """One run of the pipeline.

    x: the number of an action, as in `Problem`
    at[x]    when what an F or I reads is on its rank; below 0 while it is not made

    `memory` is the share of the caps that may be used; times are the clock's, in true W and hops.
    """

    def __init__(self, problem: Problem, memory: float, weight_time: float, hop_time: float = 1.0) -> None:
        ranks, size, count = problem.ranks, problem.size, problem.microbatches
        self.problem, self.size, self.count = problem, size, count
        self.weight_time, self.hop_time = weight_time, hop_time
        self.at = [0.0] * count + [-1.0] * (2 * size - count)
        least = [problem.least_memory(rank) * (1 + EPSILON) for rank in range(ranks)]
        self.caps = [max(cap * memory, low) for cap, low in zip(problem.caps, least, strict=True)]
        self.room = [cap - spare for cap, spare in zip(self.caps, problem.spare, strict=True)]
        self.free, self.held = [0.0] * ranks, [0.0] * ranks
        self.owed: list[deque[int]] = [deque() for _ in range(ranks)]  # stages whose W is still to run
        self.orders: Orders = [[] for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]
        self.home = problem.placement.by_stage
        self.mean = sum(problem.time[:size]) / size  # The mean time of a forward.

    def run(self) -> Orders | None:
        """Return the order of F and I on each rank; None where memory does not let it end."""
        events, free = self.events, self.free
        while events:
            now, rank = heapq.heappop(events)
            if free[rank] <= now + EPSILON:
                self.step(rank, now)
        complete = sum(map(len, self.orders)) == 2 * self.size
        return self.orders if complete else None

    @abstractmethod
    def step(self, rank: int, now: float) -> None:
        """Let a free rank take one action, if there is one that it should take."""

    def compute(self, rank: int, now: float, x: int) -> None:
        """Run an F or I."""
        problem, size = self.problem, self.size
        stage = x % size // self.count
        end = now + problem.time[x]
        self.orders[rank].append(x)
        self.held[rank] += problem.takes[x]
        if x >= size:
            self.owed[rank].append(stage)
        target = problem.feeds[x]
        if target >= 0:
            occupied, delay, link = problem.wires[x]
            there = end if link < 0 else end + (occupied + delay) * self.hop_time
            self.at[target] = there
            reader = self.home[target % size // self.count]
            if there > self.free[reader]:  # Otherwise it looks when it is free.
                heapq.heappush(self.events, (there, reader))
        self._busy(rank, end)

    def weight(self, rank: int, now: float, stage: int | None = None) -> None:
        """Run the oldest W that the rank owes; or the oldest of a stage."""
        owed = self.owed[rank]
        if stage is None:
            stage = owed.popleft()
        else:
            owed.remove(stage)
        self.held[rank] -= self.problem.held[stage]
        self._busy(rank, now + self.time_of_weight(stage))

    def time_of_weight(self, stage: int) -> float:
        """Return how long a W takes on this clock."""
        return self.problem.time[2 * self.size + stage * self.count] * self.weight_time

    def fits(self, rank: int, x: int) -> bool:
        """Return whether there is room for an F or I."""
        if x >= self.size:  # It may recompute.
            return self.held[rank] + self.problem.least_room[x] <= self.caps[rank] or not self.owed[rank]
        return self.held[rank] + self.problem.most[x // self.count] <= self.room[rank]

    def _busy(self, rank: int, end: float) -> None:
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))


def choose(
    found: Iterable[tuple[int, float, float, bool]], patience: float
) -> tuple[int, float, float, float, int, float]:
    """Choose what should come first, of actions with their places, the times in which they exist, and whether they fit.

    Returns the first that is there (-1: none) and its place; when the next is there, and the place of the first that is
    there within `patience`; and the first that is there and does not fit, with its place.
    """
    first, first_key, soon, soon_key, full, full_key = -1, NEVER, NEVER, NEVER, -1, NEVER
    for x, key, wait, fits in found:
        if not fits:
            if wait <= EPSILON and key < full_key:
                full, full_key = x, key
        elif wait <= EPSILON:
            if key < first_key:
                first, first_key = x, key
        else:
            soon = min(soon, wait)
            if wait < patience:
                soon_key = min(soon_key, key)
    return first, first_key, soon, soon_key, full, full_key
