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

from penstock.schedule.builders.clocked import EPSILON, NEVER, Clocked
from penstock.schedule.builders.problem import Orders, Problem

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
        self.alternate, self.forward_first = grouping.turn == "alternate", grouping.turn == "forward"
        self.patience = grouping.patience * self.mean
        count, size = self.count, self.size
        self.at.append(-1.0)  # of what comes after the last
        self.needed = [*problem.takes[: 2 * size], NEVER]  # never room for that
        owned = [problem.placement.stages_of(rank) for rank in range(problem.ranks)]
        self.forwards, self.inputs = (
            [[2 * size, *(first + own[stage] * count + microbatch for stage, microbatch in row[::-1])] for own in owned]
            for first, row in ((0, laps.forwards), (size, laps.inputs))
        )  # the next one stands last
        self.was_input = [True] * problem.ranks

    def step(self, rank: int, now: float) -> None:
        """Take what has the turn; what is there if that is not; a W where nothing is."""
        forward, backward, owed = self.forwards[rank][-1], self.inputs[rank][-1], self.owed[rank]
        arrival = self.at[forward]
        forward_in = NEVER if arrival < 0.0 else arrival - now
        arrival = self.at[backward]
        input_in = NEVER if arrival < 0.0 else arrival - now
        room = self.held[rank] + self.needed[forward] <= self.room[rank]
        forward_turn = self.was_input[rank] if self.alternate else self.forward_first
        forward_there = forward_in <= EPSILON
        if forward_there and (forward_turn or input_in > EPSILON):
            if not room:
                if owed:
                    self.weight(rank, now)
                    return
            elif forward_turn or input_in >= self.patience:
                self.was_input[rank] = False
                self.compute(rank, now, self.forwards[rank].pop())
                return
        if input_in <= EPSILON:
            if not (forward_turn and room and EPSILON < forward_in < self.patience):
                if self.fits(rank, backward):
                    self.was_input[rank] = True
                    self.compute(rank, now, self.inputs[rank].pop())
                else:
                    self.weight(rank, now)
        elif owed and not (forward_there and room):
            gap = min(input_in, forward_in if room and not forward_there else NEVER)
            if gap >= self.time_of_weight(owed[0]) - EPSILON:
                self.weight(rank, now)
