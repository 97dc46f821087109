"""Where the weight backwards go: one greedy rule that all zero-bubble builders share.

The forwards F and input backwards I are what other ranks wait for; their order on each
rank is what tells one schedule from another, and a builder states it. A weight backward W
is awaited by nobody: it only occupies its rank and, until it is done, holds its
activation. So W is put off for as long as that costs nothing. A rank that is about to run
its next F or I first runs the oldest W that it owes

- while that F would hold more activations than the rank's cap, and
- while it would otherwise stand idle for at least a W, waiting for another rank.

What is still owed at the end fills the drain. With 1F1B's order and equal costs nothing within
the same memory is shorter (the tests compare with the lower bound), and with unequal costs it
reached the best known makespan of the one case that the tests hold.

Why it cannot get stuck: the cap alone never makes a rank wait. A rank at its cap pays what it
owes, and where an order keeps more than `cap` microbatches between F and I, so that nothing
is owed, it goes over the cap and says so in `peaks`. An order that finishes when memory is
endless therefore finishes here.

Why there is no event queue: whether a W fits depends only on the rank's own clock and on the
time at which the awaited tensor arrives, known once the action that makes it is placed. So
the ranks are advanced in turn, each until it meets an action whose input is not made yet, in
time linear in the number of actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, trusted

FORWARD, WEIGHT = Op.F, Op.W
Key = tuple[int, Op, int | None]  # stage, op, microbatch


class Durations(NamedTuple):
    """How long one microbatch takes in each stage, and from one rank to another."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    hop: float = 0

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Return durations in which each of F, I and W takes one unit, and hops nothing."""
        ones = (1,) * stages
        return cls(ones, ones, ones)


class Filled(NamedTuple):
    """An order with its W filled in, and what that order costs."""

    orders: list[list[Action]]
    makespan: float
    peaks: list[int]  # By rank: the most microbatch-stages that it holds at once.


def preference(filled: Filled, cap: int) -> tuple[int, float]:
    """Return a key to choose among orders by: one that keeps within `cap` comes first, then the shortest."""
    return max(cap, *filled.peaks), filled.makespan


def fill_weights(
    orders: Sequence[Sequence[Action]],
    placement: Sequence[int],
    cap: int | Sequence[int],
    durations: Durations | None = None,
    overrun: float = 1e-9,
) -> Filled:
    """Put a W for each I of `orders`, which hold each rank's F and I.

    `placement` has the rank of each stage; `cap` is how many microbatch-stages per rank, or each
    rank, may hold. A W fits a gap that it overruns by no more than the fraction `overrun`.
    """
    caps = [cap] * len(orders) if isinstance(cap, int) else cap
    ranks = [_Rank(order, limit) for order, limit in zip(orders, caps, strict=True)]
    filling = _Filling(placement, durations or Durations.equal(len(placement)), overrun)
    ready = list(range(len(ranks)))
    while ready:
        number = ready.pop()
        ready += filling.advance(number, ranks[number])
    if filling.waiting:
        stuck = ", ".join(str(trusted(*key)) for key in sorted(filling.waiting))
        raise ScheduleError(f"this order never finishes: its ranks wait forever to run {stuck}")
    for rank in ranks:
        while rank.owed:
            filling.pay(rank)
    return Filled([rank.filled for rank in ranks], max(rank.clock for rank in ranks), [rank.peak for rank in ranks])


class _Rank:
    """One rank's place in its order, its clock, and what it owes and holds."""

    def __init__(self, order: Sequence[Action], cap: int) -> None:
        self.rest = iter(order)
        self.awaiting: Action | None = None
        self.cap = cap
        self.clock: float = 0
        self.owed: deque[Action] = deque()
        self.held = 0
        self.peak = 0
        self.filled: list[Action] = []


class _Filling:
    """One run of the rule: what the ranks share."""

    def __init__(self, placement: Sequence[int], durations: Durations, overrun: float) -> None:
        self.placement = placement
        self.durations = durations
        self.least_gap = [(1 - overrun) * weight for weight in durations.weight]
        # Times at which the input of an F or I is on its rank; an entry lives until that action is placed.
        self.arrivals: dict[Key, float] = {}
        self.waiting: dict[Key, int] = {}  # an action whose input is not made yet -> its rank

    def pay(self, rank: _Rank) -> None:
        """Run the oldest W that the rank owes."""
        action = rank.owed.popleft()
        rank.filled.append(action)
        rank.clock += self.durations.weight[action.stage]
        rank.held -= 1

    def advance(self, number: int, rank: _Rank) -> list[int]:
        """Run this rank until it must wait for an unplaced action; the ranks that this set free."""
        freed: list[int] = []
        actions = rank.rest if rank.awaiting is None else chain([rank.awaiting], rank.rest)
        last = len(self.placement) - 1
        for action in actions:
            stage, op, microbatch, _, _ = action
            at_the_end = stage == (0 if op is FORWARD else last)  # nothing to wait for but the rank itself
            arrival = 0 if at_the_end else self.arrivals.pop((stage, op, microbatch), None)
            if arrival is None:
                rank.awaiting = action
                self.waiting[stage, op, microbatch] = number
                break
            self.make_room(rank, op, arrival)
            key = self.place(rank, action, arrival)
            if key in self.waiting:
                freed.append(self.waiting.pop(key))
        return freed

    def make_room(self, rank: _Rank, op: Op, arrival: float) -> None:
        """Pay what is owed for as long as the next action cannot start, or must not."""
        while rank.owed and (
            arrival - rank.clock >= self.least_gap[rank.owed[0].stage] or (op is FORWARD and rank.held >= rank.cap)
        ):
            self.pay(rank)

    def place(self, rank: _Rank, action: Action, arrival: float) -> Key:
        """Run an F or I as soon as its input is there; the action that it makes the input of."""
        stage, op, microbatch, _, _ = action
        if op is FORWARD:
            rank.held += 1
            rank.peak = max(rank.peak, rank.held)
            duration, target = self.durations.forward[stage], stage + 1
        else:
            rank.owed.append(trusted(stage, WEIGHT, microbatch))
            duration, target = self.durations.input[stage], stage - 1
        rank.clock = max(rank.clock, arrival) + duration
        rank.filled.append(action)
        key = (target, op, microbatch)
        if 0 <= target < len(self.placement):
            hop = 0 if self.placement[target] == self.placement[stage] else self.durations.hop
            self.arrivals[key] = rank.clock + hop
        return key
