"""Orders on a loop that take microbatches through it in groups: the group-interleaved family.

A rank takes a group of g microbatches through its first stage, then through its second, and so on, and the gradients
back in the same way; in between, F and I take turns. With v stages per rank, a slot is what a rank has to do for one
stage of one microbatch: t = (F + I + W) / v. If a forward is on the next rank after g / p of a slot, for p ranks, it is
back on the first rank after g slots, just when the group has passed: no rank waits. Gradients then have the other
(1 - g / p) of a slot for each hop. So any g will do for which

    F / v + hop <= (g / p) t    and    I / v + hop <= (1 - g / p) t

With g = p this is the interleaved order, in 1F1B's memory. With g = p / 2 the first rank, which is the fullest, holds
p (v + 1) / 2 stages of microbatches: five eighths of 1F1B's memory with four stages per rank.

Where less memory is there than a group needs, ranks wait for it, and whoever's turn it is.

All ranks take the same *laps* in the same order: a lap is one microbatch on the way from the first rank to the last, on
the first stage of each rank, or the second, and so on. So an order is no more than two lists of laps, forward and back,
and `laps.py` looks for better ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.schedule.search.orders.clocked import EPSILON, NEVER, Clocked
from penstock.schedule.search.problem import Orders, Problem

__all__ = ["Grouping", "Lap", "Laps", "group_sizes", "grouped", "laps_of", "take_laps"]

Lap = tuple[int, int]  # which of a rank's stages, and the microbatch


@dataclass(frozen=True)
class Grouping:
    """How large groups are, and how a rank takes turns."""

    size: int
    patience: float = 1.0  # how long to wait for the kind whose turn it is, in forwards
    weight_time: float = 1.0  # the clock's W, in true ones
    turn: Literal["alternate", "input", "forward"] = "alternate"
    memory: float = 1.0  # the share of the caps to use
    even: bool = False  # all groups about as large, or the last one alone smaller or larger


def group_sizes(microbatches: int, size: int, even: bool = False) -> list[int]:
    """The sizes of the groups of a batch. A small rest joins the last group."""
    count, rest = divmod(microbatches, size)
    if even and count:
        count += rest > 0
        each, larger = divmod(microbatches, count)
        return [each + 1] * larger + [each] * (count - larger)
    sizes = [size] * count
    if rest and sizes and 2 * rest < size:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes


class Laps(NamedTuple):
    """The laps of all ranks in order, and how a rank takes turns between those forward and those back."""

    grouping: Grouping
    forwards: list[Lap]
    inputs: list[Lap]


def laps_of(problem: Problem, grouping: Grouping) -> Laps:
    """Group by group, and in a group stage by stage."""
    stages = range(problem.placement.stages_per_rank)
    forwards: list[Lap] = []
    inputs: list[Lap] = []
    first = 0
    for size in group_sizes(problem.microbatches, grouping.size, grouping.even):
        group = range(first, first + size)
        forwards += [(stage, microbatch) for stage in stages for microbatch in group]
        inputs += [(stage, microbatch) for stage in reversed(stages) for microbatch in group]
        first += size
    return Laps(grouping, forwards, inputs)


def grouped(problem: Problem, grouping: Grouping) -> Orders | None:
    """The order of F and I; None where memory does not hold what a group needs."""
    return take_laps(problem, laps_of(problem, grouping))


def take_laps(problem: Problem, laps: Laps) -> Orders | None:
    """The order of F and I that comes of laps; None where memory does not let it end."""
    return _Groups(problem, laps).run()


class _Groups(Clocked):
    """Every rank's next F and next I are known; which of them comes first is seen when it is free."""

    def __init__(self, problem: Problem, laps: Laps) -> None:
        grouping = laps.grouping
        super().__init__(problem, grouping.memory, grouping.weight_time)
        self.turn, self.patience = grouping.turn, grouping.patience * self.mean
        count, size = self.count, self.size
        owned = [problem.placement.stages_of(rank) for rank in range(problem.ranks)]
        self.forwards = [[own[stage] * count + microbatch for stage, microbatch in laps.forwards] for own in owned]
        self.inputs = [[size + own[stage] * count + microbatch for stage, microbatch in laps.inputs] for own in owned]
        self.forward_next, self.input_next = [0] * problem.ranks, [0] * problem.ranks
        self.was_input = [True] * problem.ranks

    def step(self, rank: int, now: float) -> None:
        """Take what has the turn; what is there if that is not; a W where nothing is."""
        forward, forward_in = self._next(self.forwards[rank], self.forward_next[rank], now)
        backward, input_in = self._next(self.inputs[rank], self.input_next[rank], now)
        owed = self.owed[rank]
        room = forward >= 0 and self.fits(rank, forward)
        forward_turn = self.turn == "forward" or (self.turn == "alternate" and self.was_input[rank])
        forward_there = forward_in <= EPSILON
        waits_for_input = not forward_turn and EPSILON < input_in < self.patience
        if forward_there and room and not waits_for_input and (forward_turn or input_in > EPSILON):
            self.forward_next[rank] += 1
            self.was_input[rank] = False
            self.compute(rank, now, forward)
        elif forward_there and not room and owed and (forward_turn or input_in > EPSILON):
            self.weight(rank, now)
        elif input_in <= EPSILON and not (forward_turn and room and EPSILON < forward_in < self.patience):
            if not self.fits(rank, backward):
                self.weight(rank, now)
                return
            self.input_next[rank] += 1
            self.was_input[rank] = True
            self.compute(rank, now, backward)
        elif owed and input_in > EPSILON:
            gap = min(input_in, forward_in if room and not forward_there else NEVER)
            if not (forward_there and room) and gap >= self.time_of_weight(owed[0]) - EPSILON:
                self.weight(rank, now)

    def _next(self, sequence: list[int], place: int, now: float) -> tuple[int, float]:
        """The next of a kind, and in what time it is there; NEVER where that is not known."""
        if place == len(sequence):
            return -1, NEVER
        x = sequence[place]
        return x, NEVER if self.at[x] < 0.0 else self.at[x] - now
