"""Orders on a V in 1F1B's memory: groups of microbatches that fill all of it, made for steps that overlap.

Where steps overlap, a rank idles at the boundary of two steps: from its last I to its first F of the next step it
can run nothing but W, and from its first F to its first I nothing but F. Memory says how many of each there can be. So
at both ends memory should be full, of F that wait for their I and of I that wait for their W; and no rank should wait
in the middle.

With v legs (down the V, up, down, ...) microbatches go in groups of as many as there are ranks. A slot is what a rank
has to do for one stage of one microbatch. Leg j of a group's forwards shares its slots with leg j of the gradients of
the group before it, which moves in the same direction, and on each rank a slot of what moves down is followed by one of
what moves up. A leg down takes as long as one microbatch needs to pass it. A leg up is done when the group has passed
both, so that the two legs that meet in a turn alternate on its rank. With four legs A, B, C, D:

    first rank   A0 . A1 . A2 . A3 .      B0 C0 B1 C1 B2 C2 B3 C3      D0 A0' D1 A1' ...
    last rank      A0 B0 A1 B1 A2 B2 A3 B3      C0 D0 C1 D1 C2 D2 C3 D3      A0' B0' ...

As in `rhythm`, this is what should come first of what is there, not when it runs: in the fill, a rank takes the
forwards of the next group for as long as memory allows. W are filled in afterwards (`evaluate`).

Stages that take unequally long break the slots, and each rank's order becomes another one. Where they differ by a few
hundredths, the order of equal stages, which is regular, does better: that is what `even` is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.builders.clocked import EPSILON, Clocked, choose
from penstock.schedule.builders.problem import Orders, Problem

__all__ = ["Wave", "sweep"]


@dataclass(frozen=True)
class Wave:
    """What a rank prefers when microbatches move in groups."""

    size: float = 1.0  # of a group, in ranks
    interval: float = 0.5  # between two microbatches of a group; 1 is what a rank has to do for one
    input: float = -0.12  # how much later gradients come first, in steps of a leg
    late: float = 0.2  # the same for the last group in addition, where forwards should come through first
    pace: float = 1.0  # how long the legs of gradients take, as a share of those of forwards
    patience: float = 0.6  # how long to wait for what should come first, in forwards
    overrun: float = 0.15  # the share of a W by which it may make the next action late
    weight_time: float = 0.1  # the clock, in true W and hops
    hop_time: float = 0.0
    memory: float = 1.0  # the share of the caps to use
    even: bool = False  # the clock: all stages take equally long


def sweep(problem: Problem, wave: Wave) -> Orders | None:
    """The order of F and I; None where memory does not let it end."""
    return _Sweep(problem.even if wave.even else problem, wave).run()


class _Sweep(Clocked):
    """A free rank takes what comes first in the groups, of what is there and fits."""

    def __init__(self, problem: Problem, wave: Wave) -> None:
        super().__init__(problem, wave.memory, wave.weight_time, wave.hop_time)
        self.patience, self.keep = wave.patience * self.mean, 1 - wave.overrun
        self.forward_at, self.input_at, self.turn, self.input_turn = _times(problem, wave)
        self.forwards, self.inputs = [0] * problem.stages, [0] * problem.stages
        self.owned = [problem.placement.stages_of(rank) for rank in range(problem.ranks)]

    def step(self, rank: int, now: float) -> None:
        """Take the first that is there, unless one that should come before it is there soon; else a W."""
        first, first_key, soon, soon_key, _, full_key = choose(self._next(rank, now), self.patience)
        owed = self.owed[rank]
        if full_key < first_key and owed:
            self.weight(rank, now)
        elif first >= 0 and soon_key >= first_key:
            (self.forwards if first < self.size else self.inputs)[first % self.size // self.count] += 1
            self.compute(rank, now, first)
        elif owed and soon >= self.keep * self.time_of_weight(owed[0]) - EPSILON:
            self.weight(rank, now)

    def _next(self, rank: int, now: float) -> list[tuple[int, float, float, bool]]:
        """Of each stage the next F and I that are made: number, place, in what time it is there, and whether it fits.

        What the oldest microbatch still needs on this rank is left free for it, so that it can always go on.
        """
        found, count, size, at = [], self.count, self.size, self.at
        owned, most = self.owned[rank], self.problem.most
        oldest = self.forwards[owned[-1]]
        reserved = sum([most[stage] for stage in owned if self.forwards[stage] <= oldest])
        room = self.room[rank] - self.held[rank]
        for stage in owned:
            microbatch = self.forwards[stage]
            if microbatch < count and (arrival := at[stage * count + microbatch]) >= 0.0:
                fits = most[stage] + (0.0 if microbatch == oldest else reserved) <= room
                key = self.forward_at[stage] + self.turn[microbatch]
                found.append((stage * count + microbatch, key, arrival - now, fits))
            microbatch = self.inputs[stage]
            if microbatch < count and (arrival := at[size + stage * count + microbatch]) >= 0.0:
                key = self.input_at[stage] + self.input_turn[microbatch]
                x = size + stage * count + microbatch
                found.append((x, key, arrival - now, self.fits(rank, x)))
        return found


def _times(problem: Problem, wave: Wave) -> tuple[list[float], list[float], list[float], list[float]]:
    """Where the first microbatch's F and I stand in each stage, and how much later those of each microbatch do."""
    ranks, stages, count = problem.ranks, problem.stages, problem.microbatches
    legs, work = stages // ranks, problem.busiest or 1.0  # any will do if nothing takes time
    hop = sum(problem.wires[0][:2]) if ranks > 1 else 0.0
    down = ranks * (sum(problem.time[: problem.size]) / problem.size + hop)
    pair = ranks * work * 2 / legs  # of a leg down and a leg up, for a group
    knots = [leg // 2 * pair + leg % 2 * down for leg in range(2 * legs + 1)]
    forward = knots[: legs + 1]
    backward = [knots[legs] + (knot - knots[legs]) * wave.pace + wave.input * pair for knot in knots[legs:]]
    forward_at = [_between(forward, stage / ranks) for stage in range(stages)]
    input_at = [_between(backward, legs - (stage / ranks)) for stage in range(stages)]
    size = max(1, round(wave.size * ranks))
    turn = [work * (m // size * size + m % size * wave.interval) for m in range(count)]
    last = (count - 1) // size * size  # the first of the last group
    return forward_at, input_at, turn, [key + wave.late * pair * (m >= last) for m, key in enumerate(turn)]


def _between(knots: list[float], place: float) -> float:
    """The value at a place between two knots."""
    leg = min(int(place), len(knots) - 2)
    return knots[leg] + (knots[leg + 1] - knots[leg]) * (place - leg)
