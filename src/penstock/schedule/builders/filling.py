"""What an order costs, and where its weight gradients go.

The forwards F and input backwards I are what other ranks wait for; their order on each rank is what tells one schedule
from another. A W is awaited by nobody: it only occupies its rank and, until it is done, holds its activation. So W is
put off for as long as that costs nothing. An order is either complete, or holds only F and I; then a rank runs the
oldest W that it owes

- while its next action would not fit into memory, and
- while it would otherwise idle for about as long as a W takes.

"About" is `overrun`: the share of a W by which it may make the next action late; it is one share while the rank has
forwards to run, and another one in the drain, where a late gradient makes all that is left late. A share above one
means one W before each action, whether there is a gap or not. What is still owed at the end comes last.

With 1F1B's order and equal costs nothing within the same memory is shorter (the tests compare with the lower bound).

Where steps overlap, a rank goes on to the next step when it is done with its own part, so the price is that of a step
whose ranks begin when those of the step before it ended. If each rank begins step after step so much later, the ranks
can keep that up for ever: the longest time of a rank from its first start to its end is therefore never below the
period, whenever the ranks begin, and the least of a few steps is taken.

There is no event queue, because whether a W fits depends only on the rank's own clock and on the time at which the
awaited value arrives, known once the action that makes it is placed. So ranks are advanced in turn, each until it meets
an action whose input is not made yet, in time linear in the number of actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.builders.problem import Orders, Problem
from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs

EPSILON = 1e-9
STEPS = 4  # that are run, at most, where steps overlap
Overrun = tuple[float, float]  # while there are forwards to run, and after the last of them
Score = tuple[float, float]  # the objective, then how late the ranks finish their F and I in all
NOTHING: Score = (math.inf, math.inf)  # of an order that does not fit


class Filled(NamedTuple):
    """A builder's order with its W filled in, and what that order costs."""

    orders: list[list[Action]]
    makespan: float
    peaks: list[int]  # By rank: the most microbatch-stages that it holds at once.


def fill_weights(
    orders: Sequence[Sequence[Action]], placement: Sequence[int], cap: int | Sequence[int], costs: Costs | None = None
) -> Filled:
    """Put a W for each I of `orders`, which hold each rank's F and I.

    `placement` has the rank of each stage; `cap` is how many microbatch-stages per rank, or each rank, may hold. The
    cap alone never makes a rank wait: where an order keeps more than that between F and I, so that no W is owed, the
    rank goes over the cap, as `peaks` says. So an order that finishes when memory is endless finishes here.
    """
    caps = [cap] * len(orders) if isinstance(cap, int) else cap
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    problem = Problem(Placement(placement), microbatches, costs or Costs(), caps)
    run = _Run(problem, problem.numbers(orders), (EPSILON, EPSILON), True, [0.0] * len(orders), strict=False)
    if not run.finish():
        stuck = ", ".join(map(str, sorted(map(problem.action, run.waiting))))
        raise ScheduleError(f"this order never finishes: its ranks wait forever to run {stuck}")
    found = run.complete()
    peaks = [round(max(accumulate(problem.takes[x] for x in order))) for order in found]
    return Filled([[problem.action(x) for x in order] for order in found], max(run.ends), peaks)


def preference(filled: Filled, cap: int) -> tuple[int, float]:
    """Return a key to choose among orders by: one that keeps within `cap` comes first, then the shortest."""
    return max(cap, *filled.peaks), filled.makespan


class Candidate(NamedTuple):
    """An order and its price. `overrun` is None where the order is complete."""

    score: Score
    orders: Orders
    overrun: Overrun | None


def price(
    problem: Problem, orders: Orders, overrun: Overrun | None, gaps: list[tuple[int, int]] | None = None
) -> Score | None:
    """Return the score of an order, or None where it does not fit into memory or never ends.

    `gaps` is filled with (rank, position) of the actions that a rank idles for.
    """
    run = _finished(problem, orders, overrun, logging=False)
    if run is None:
        return None
    if gaps is not None:
        gaps[:] = run.gaps
    return run.score()


def complete(problem: Problem, candidate: Candidate) -> Orders:
    """Return the candidate's orders with every W in its place."""
    return candidate.orders if candidate.overrun is None else fill(problem, candidate.orders, candidate.overrun).orders


def fill(problem: Problem, orders: Orders, overrun: Overrun) -> Candidate:
    """Make the complete order that comes of an order of F and I, with its price."""
    run = _finished(problem, orders, overrun, logging=True)
    return Candidate(NOTHING, orders, overrun) if run is None else Candidate(run.score(), run.complete(), None)


def _finished(problem: Problem, orders: Orders, overrun: Overrun | None, logging: bool) -> _Run | None:
    """Return the run of one step, of overlapping ones the best; None where memory or the order does not let it end."""
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
    """One pass over all ranks. `begin` is when each is free; if not `strict`, an order may hold more than fits."""

    def __init__(
        self,
        problem: Problem,
        orders: Orders,
        overrun: Overrun | None,
        logging: bool,
        begin: Sequence[float],
        strict: bool = True,
    ) -> None:
        ranks = len(orders)
        self.problem, self.orders, self.logging, self.strict = problem, orders, logging, strict
        self.filling = overrun is not None
        self.keep, self.keep_in_drain = (1.0 - share for share in overrun or (0.0, 0.0))
        self.at = problem.at_first.copy()  # when an action's input is on its rank; below 0 while it is not made
        self.places, self.clocks, self.held = [0] * ranks, [*begin], [0.0] * ranks
        self.owed: list[list[int]] = [[] for _ in orders]  # every I so far
        self.paid = [0] * ranks  # how many of them have had their W
        self.forwards = [len(order) // (2 if self.filling else 3) for order in orders]  # that are still to run
        kept = problem.between if self.filling and problem.objective == "steady" else [0] * ranks
        # how many W may make others late
        self.eager = [units - late for units, late in zip(self.forwards, kept, strict=True)]
        self.first = [0.0] * ranks
        self.waiting: dict[int, int] = {}
        self.links: dict[int, float] = {}
        self.unmade: dict[tuple[int, int], int] = {}  # by message and microbatch: makers that have not run
        self.missing: dict[
            int, tuple[int, float]
        ] = {}  # messages that have not come, and when the last so far is there
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
        cap, keep, owed = problem.caps[rank], self.keep, self.owed[rank]
        clock, held = self.clocks[rank], self.held[rank]
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
                if arrival - clock >= share * time[weight] - EPSILON or (held + need > cap and need > 0.0):
                    clock += time[weight]
                    held += takes[weight]
                    paid += 1
                    if logging:
                        log.append(weight)
                    if share < 0.0:
                        break
                else:
                    break
            if need > 0.0 and held + need > cap and self.strict:
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
            elif target < -1:
                ready += self._send(x, clock)
        self.clocks[rank], self.held[rank], self.paid[rank], self.forwards[rank] = clock, held, paid, forwards
        return True

    def _carry(self, wire: tuple[float, float, int], end: float) -> float:
        """Return when what is made at `end` is on the rank that needs it."""
        occupied, delay, link = wire
        if occupied:
            end = self.links[link] = max(end, self.links.get(link, 0.0)) + occupied
        return end + delay

    def _send(self, x: int, end: float) -> list[int]:
        """Send on what is complete with x, which several read or make; the ranks that this sets free."""
        problem, freed = self.problem, []
        place, microbatch = divmod(x, problem.microbatches)
        for number, makers, readers, link, occupied, delay in problem.sent[place]:
            left = self.unmade.get((number, microbatch), makers) - 1
            self.unmade[number, microbatch] = left
            if left:
                continue
            there = end
            if link >= 0:
                there = self._carry((occupied * problem.scale[microbatch], delay, link), end)
            for reader in readers:
                y = reader * problem.microbatches + microbatch
                awaited, latest = self.missing.get(y, (problem.awaited[reader], 0.0))
                self.missing[y] = awaited - 1, max(latest, there)
                if awaited == 1:
                    self.at[y] = max(latest, there)
                    if y in self.waiting:
                        freed.append(self.waiting.pop(y))
        return freed

    def complete(self) -> Orders:
        """Return the orders as they were run, with the W that are still owed."""
        logs = zip(self.logs, self.owed, self.paid, strict=True)
        return [log + [x + self.problem.size for x in owed[paid:]] for log, owed, paid in logs]

    def score(self) -> Score:
        """Return the objective once the W that are still owed have run too."""
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
