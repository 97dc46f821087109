"""Priority rules, as values: for any placement, for loops in groups, and for Vs in waves.

ByStage    what goes first is the latest stage, the earliest, or the oldest microbatch

Groups     On a loop, a rank takes a group of g microbatches through its first stage, then through its second, and so
           on, and the gradients back in the same way; in between, F and I take turns. With v stages per rank, a slot is
           what a rank has to do for one stage of one microbatch: t = (F + I + W) / v. If a forward is on the next rank
           after g / p of a slot, for p ranks, it is back on the first rank after g slots, just when the group has
           passed: no rank waits. Gradients then have the other (1 - g / p) of a slot for each hop. So any g will do for
           which

               F / v + hop <= (g / p) t    and    I / v + hop <= (1 - g / p) t

           With g = p this is the interleaved order, in 1F1B's memory. With g = p / 2 the first rank, which is the
           fullest, holds p (v + 1) / 2 stages of microbatches: five eighths of 1F1B's memory with four stages per rank.
           Where less memory is there than a group needs, ranks wait for it, and whoever's turn it is.

Wave       On a V in 1F1B's memory, groups that fill all of it, made for steps that overlap. There a rank idles at the
           boundary of two steps: from its last I to its first F of the next step it can run nothing but W, and from its
           first F to its first I nothing but F. Memory says how many of each there can be. So at both ends memory
           should be full, of F that wait for their I and of I that wait for their W; and no rank should wait in the
           middle. With v legs (down the V, up, down, ...) microbatches go in groups of as many as there are ranks. Leg
           j of a group's forwards shares its slots with leg j of the gradients of the group before it, which moves in
           the same direction, and on each rank a slot of what moves down is followed by one of what moves up. A leg
           down takes as long as one microbatch needs to pass it. A leg up is done when the group has passed both, so
           that the two legs that meet in a turn alternate on its rank. With four legs A, B, C, D:

               first rank   A0 . A1 . A2 . A3 .      B0 C0 B1 C1 B2 C2 B3 C3      D0 A0' D1 A1' ...
               last rank      A0 B0 A1 B1 A2 B2 A3 B3      C0 D0 C1 D1 C2 D2 C3 D3      A0' B0' ...

           Stages that take unequally long break the slots, and each rank's order becomes another one. Where they differ
           by a few hundredths, the order of equal stages, which is regular, does better: that is what `equal` is for.

For Vs in less memory there is `schedule/builders/rhythm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.builders.dispatch import Keys, Rule
from penstock.schedule.builders.problem import Problem


@dataclass(frozen=True, kw_only=True)
class ByStage(Rule):
    """What goes first is a stage's: of each kind the "deep"est, the most "shallow", or the "old"est microbatch."""

    weight_time: float = 0.5
    hop_time: float = 0.0
    forward: str = "deep"
    input: str = "deep"

    def keys(self, problem: Problem) -> Keys:
        """Return keys by stage, or by turn."""
        turns = [float(turn) for turn in range(problem.microbatches)]
        nothing, places = [0.0] * problem.microbatches, list[float]()
        for which in self.forward, self.input:
            sign = {"deep": -1.0, "shallow": 1.0, "old": 0.0}[which]
            places += [sign * stage for stage in range(problem.stages)]
        return Keys(
            places,
            turns if self.forward == "old" else nothing,
            turns if self.input == "old" else nothing,
        )


@dataclass(frozen=True, kw_only=True)
class Groups(Rule):
    """How large groups are."""

    patience: float = 1.0
    hop_time: float = 1.0
    size: int = 1
    even: bool = False  # all groups about as large, or the last one alone smaller or larger
    strict: bool = True  # each rank waits for what goes first: then groups never mix, and more of them fit into memory

    def keys(self, problem: Problem) -> Keys:
        """Return keys by group, then by stage of the rank, then by microbatch."""
        sizes = group_sizes(problem.microbatches, self.size, self.even)
        most, per_rank = max(sizes), problem.placement.stages_per_rank
        turns = [float(group * per_rank * most + turn) for group, size in enumerate(sizes) for turn in range(size)]
        places = [0.0] * (2 * problem.stages)
        for owned in problem.owned:
            for number, stage in enumerate(owned):
                places[stage] = float(number * most)
                places[problem.stages + stage] = float((per_rank - 1 - number) * most)
        return Keys(places, turns, turns, strict=self.strict, reserve=not self.strict)


def group_sizes(microbatches: int, size: int, even: bool = False) -> list[int]:
    """Return the sizes of the groups of a batch. A small rest joins the last group."""
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


@dataclass(frozen=True, kw_only=True)
class Wave(Rule):
    """What goes first where microbatches move in groups along a V."""

    turn: str = "key"
    patience: float = 0.6
    overrun: float = 0.15
    weight_time: float = 0.1
    hop_time: float = 0.0
    size: float = 1.0  # A group is so many times as large as the number of ranks.
    # How long two microbatches of a group are apart; 1 is what a rank has to do for one.
    interval: float = 0.5
    input: float = -0.12  # how much later gradients come first, in steps of a leg
    late: float = 0.2  # the same for the last group in addition, where forwards should come through first
    pace: float = 1.0  # how long the legs of gradients take, as a share of those of forwards

    def keys(self, problem: Problem) -> Keys:
        """Return when each place would have its turn if nobody waited."""
        ranks, stages, count = problem.ranks, problem.stages, problem.microbatches
        legs, work = stages // ranks, problem.busiest or 1.0  # any will do if nothing takes time
        hop = sum(problem.wires[0][:2]) if ranks > 1 else 0.0
        down = ranks * (sum(problem.lengths[:stages]) / stages + hop)
        pair = ranks * work * 2 / legs  # A leg down and a leg up take a group so long.
        knots = [leg // 2 * pair + leg % 2 * down for leg in range(2 * legs + 1)]
        forward = knots[: legs + 1]
        backward = [knots[legs] + (knot - knots[legs]) * self.pace + self.input * pair for knot in knots[legs:]]
        places = [_between(forward, stage / ranks) for stage in range(stages)]
        places += [_between(backward, legs - stage / ranks) for stage in range(stages)]
        size = max(1, round(self.size * ranks))
        turns = [work * (m // size * size + m % size * self.interval) for m in range(count)]
        last = (count - 1) // size * size  # the first of the last group
        return Keys(places, turns, [key + self.late * pair * (m >= last) for m, key in enumerate(turns)])


def _between(knots: list[float], place: float) -> float:
    """Return the value at a place between two knots."""
    leg = min(int(place), len(knots) - 2)
    return knots[leg] + (knots[leg + 1] - knots[leg]) * (place - leg)
