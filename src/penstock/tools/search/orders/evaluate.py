"""What an order costs, and where its weight gradients go.

An order is either complete, or holds only F and I. The W of the latter are filled in by the
rule of `builders/greedy.py`: a W is awaited by nobody, so a rank runs the oldest one that it
owes when its next F would not fit into memory, and when it would otherwise idle for about as
long as a W takes. "About" is `overrun`: the share of a W by which it may make the next action
late; it is one share while the rank has forwards to run, and another one in the drain, where a late gradient makes
all that is left late. A share above one means one W before each action, whether there is a gap or not. A search asks
for thousands of prices, so here everything is a number, memory may have any size, and links may queue.

Where steps overlap, a rank goes on to the next step when it is done with its own part, so the price is that of a step
whose ranks begin when those of the step before it ended. If each rank begins step after step so much later, the ranks
can keep that up for ever: the longest time of a rank from its first start to its end is therefore never below the
period, whenever the ranks begin, and the least of a few steps is taken.

There is no event queue, for the reason that `greedy` gives: ranks are advanced in turn, each
until it meets an action whose input is not made yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub
from typing import NamedTuple

from penstock.schedule.builders.problem import Orders, Problem

__all__ = ["NOTHING", "Candidate", "Overrun", "Score", "complete", "fill", "price"]

EPSILON = 1e-9
STEPS = 4  # that are run, at most, where steps overlap
Overrun = tuple[float, float]  # while there are forwards to run, and after the last of them
Score = tuple[float, float]  # the objective, then how late the ranks finish their F and I in all
NOTHING: Score = (math.inf, math.inf)  # of an order that does not fit


class Candidate(NamedTuple):
    """An order and its price. `overrun` is None where the order is complete."""

    score: Score
    orders: Orders
    overrun: Overrun | None


def price(
    problem: Problem, orders: Orders, overrun: Overrun | None, gaps: list[tuple[int, int]] | None = None
) -> Score | None:
    """The score of an order, or None where it does not fit into memory or never ends.

    `gaps` is filled with (rank, position) of the actions that a rank idles for.
    """
    run = _finished(problem, orders, overrun, logging=False)
    if run is None:
        return None
    if gaps is not None:
        gaps[:] = run.gaps
    return run.score()


def complete(problem: Problem, candidate: Candidate) -> Orders:
    """The candidate's orders with every W in its place."""
    return candidate.orders if candidate.overrun is None else fill(problem, candidate.orders, candidate.overrun).orders


def fill(problem: Problem, orders: Orders, overrun: Overrun) -> Candidate:
    """The complete order that comes of an order of F and I, with its price."""
    run = _finished(problem, orders, overrun, logging=True)
    if run is None:
        return Candidate(NOTHING, orders, overrun)
    filled = [
        log + [x + problem.size for x in owed[paid:]]
        for log, owed, paid in zip(run.logs, run.owed, run.paid, strict=True)
    ]
    return Candidate(run.score(), filled, None)


def _finished(problem: Problem, orders: Orders, overrun: Overrun | None, logging: bool) -> _Run | None:
    """The run of one step, of overlapping ones the best; None where memory or the order does not let it end."""
    begin, best = [0.0] * len(orders), None
    for _ in range(STEPS if problem.objective == "steady" else 1):
        run = _Run(problem, orders, overrun, logging, begin)
        if not run.finish():
            return None
        best = run if best is None or run.score() < best.score() else best
        ends = run.ends
        longest = max(range(len(orders)), key=lambda rank: ends[rank] - run.first[rank])
        if not any(begin) and not run.first[longest]:
            break  # no other rank was ever busy with the step before, so this one cannot take less
        if max(taken := [*map(sub, ends, begin)]) - min(taken) <= EPSILON * max(taken):
            break  # from here on, every step is like this one
        begin = [end - min(ends) for end in ends]
    return best


class _Run:
    """One pass over all ranks. `begin` is when each of them is free."""

    def __init__(
        self, problem: Problem, orders: Orders, overrun: Overrun | None, logging: bool, begin: Sequence[float]
    ) -> None:
        count, size, ranks = problem.microbatches, problem.size, len(orders)
        self.problem, self.orders, self.logging = problem, orders, logging
        self.filling = overrun is not None
        self.keep, self.keep_in_drain = (1.0 - share for share in overrun or (0.0, 0.0))
        # when an action's input is on its rank; W and the first stage's F need nothing from elsewhere
        self.at = [0.0] * count + [-1.0] * (2 * size - count) + [0.0] * size
        self.places, self.clocks, self.held = [0] * ranks, [*begin], [0.0] * ranks
        self.owed: list[list[int]] = [[] for _ in orders]  # every I so far
        self.paid = [0] * ranks  # how many of them have had their W
        self.forwards = [len(order) // (2 if self.filling else 3) for order in orders]  # that are still to run
        kept = problem.between if self.filling and problem.objective == "steady" else [0] * ranks
        self.eager = [
            units - late for units, late in zip(self.forwards, kept, strict=True)
        ]  # W that may make others late
        self.first = [0.0] * ranks
        self.waiting: dict[int, int] = {}
        self.links: dict[int, float] = {}
        self.gaps: list[tuple[int, int]] = []
        self.logs: Orders = [[] for _ in orders]

    def finish(self) -> bool:
        """Run all ranks to their ends; False where memory or the order does not allow it."""
        ready = list(range(len(self.orders)))
        while ready:
            if not self.advance(ready.pop(), ready):
                return False
        return not self.waiting

    def advance(self, rank: int, ready: list[int]) -> bool:
        """Run one rank until it must wait for an action that has not run; False when memory runs over."""
        problem, order, at, waiting = self.problem, self.orders[rank], self.at, self.waiting
        size, time, takes, feeds, wires = problem.size, problem.time, problem.takes, problem.feeds, problem.wires
        room = problem.room if self.filling else problem.least_room
        cap, keep, owed, clock, held = (
            problem.caps[rank],
            self.keep,
            self.owed[rank],
            self.clocks[rank],
            self.held[rank],
        )
        filling, logging, log, paid = self.filling, self.logging, self.logs[rank], self.paid[rank]
        forwards, eager = self.forwards[rank], self.eager[rank]
        if not forwards and order[self.places[rank] - 1] >= size:
            keep = self.keep_in_drain
        for place in range(self.places[rank], len(order)):
            x = order[place]
            arrival = at[x]
            if arrival < 0.0:
                waiting[x] = rank
                self.places[rank] = place
                break
            need = room[x]
            while paid < len(owed):
                weight = owed[paid] + size
                share = keep if paid < eager else 1.0
                if arrival - clock >= share * time[weight] - EPSILON or held + need > cap:
                    clock += time[weight]
                    held += takes[weight]
                    paid += 1
                    if logging:
                        log.append(weight)
                    if share < 0.0:
                        break
                else:
                    break
            if need > 0.0 and held + need > cap:
                return False
            held += takes[x]
            if filling:
                if x < size:
                    forwards -= 1
                else:
                    owed.append(x)
                    if not forwards:
                        keep = self.keep_in_drain
            if logging:
                log.append(x)
            if arrival > clock:
                self.gaps.append((rank, place))
                clock = arrival
            if place == 0:
                self.first[rank] = clock
            clock += time[x]
            target = feeds[x]
            if target >= 0:
                at[target] = clock if wires[x][2] < 0 else self._carry(wires[x], clock)
                if target in waiting:
                    ready.append(waiting.pop(target))
        self.clocks[rank], self.held[rank], self.paid[rank], self.forwards[rank] = clock, held, paid, forwards
        return True

    def _carry(self, wire: tuple[float, float, int], end: float) -> float:
        """When what is made at `end` is on the rank that needs it."""
        occupied, delay, link = wire
        if occupied:
            end = self.links[link] = max(end, self.links.get(link, 0.0)) + occupied
        return end + delay

    def score(self) -> Score:
        """The objective once the W that are still owed have run too."""
        if self.problem.objective == "makespan":
            return max(self.ends), sum(self.clocks)
        spans = [end - first for end, first in zip(self.ends, self.first, strict=True)]
        return max(spans), sum(spans if self.problem.objective == "steady" else self.clocks)

    @property
    def ends(self) -> list[float]:
        """When each rank is done, with the W that are still owed."""
        time, size = self.problem.time, self.problem.size
        return [
            clock + sum([time[x + size] for x in owed[paid:]])
            for clock, owed, paid in zip(self.clocks, self.owed, self.paid, strict=True)
        ]
