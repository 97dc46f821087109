"""Orders on a V that keep to a rhythm in which no rank waits, in about half of 1F1B's memory.

Microbatches move down the V and up again: with v stages per rank, v legs forward and v legs back. A slot is what a rank
has to do for one stage of one microbatch: t = F + I + W. Let a leg that moves down (of forwards or gradients) be on the
next rank after a share d of a slot, and one that moves up after 1 - d. Seen from rank to rank, what moves up then
shifts by exactly one slot against what moves down. So if all that moves down starts at whole slots, and all that moves
up a fixed part of a slot later, nothing ever meets: each slot of each rank has one action of a leg that moves down, one
of a leg that moves up, and a W. What is left to choose are whole slots of rest at the turns, so that the v legs that
move down are in different slots modulo v, and those that move up too (`_rests`). All ranks then hold the same: about
p / 2 microbatches.

The rhythm tells what should come first when several actions are there, not when they run: a rank that is free takes the
first of what has arrived, so that the fill is quick. A share of memory for each stage (`quotas`) keeps one stage from
taking what another one needs.

In less memory than that, ranks must wait. What a microbatch holds, it holds for as long as it is on its way: so with a
`pace`, the ones on their way go without rest, and the next one starts only after the time in which memory can bear
another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from penstock.schedule.builders.dispatch import EPSILON, Keys, Rule
from penstock.schedule.builders.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Rhythm(Rule):
    """What goes first where stages keep to the rhythm of a V."""

    turn: str = "key"
    patience: float = 0.3
    overrun: float = 0.6
    weight_time: float = 0.7
    hop_time: float = 0.0
    down: float = 0.5  # a slot's share for a hop down, between the least and the most that it can be
    slack: float | None = 0.0  # memory of a stage beyond what the rhythm needs, in periods; None: all shared by `shape`
    shape: float = 0.8  # how much more of the memory goes to stages that hold for long
    # Without rest: so many of the shortest periods that memory can bear between two.
    pace: float | None = None

    def keys(self, problem: Problem) -> Keys:
        """Return when each place would have its turn if nobody waited."""
        rooms = self.rooms(problem)
        if self.pace is None:
            forward_at, input_at, period = _times(problem, self.down)
            quotas, starts = _quotas(problem, self, rooms, (forward_at, input_at, period)), 0.0
        else:
            forward_at, input_at, period = _restless(problem, self.pace, rooms)
            quotas, starts = None, period
        turns = [turn * period for turn in range(problem.microbatches)]
        return Keys([*forward_at, *input_at], turns, turns, quotas, reserve=False, starts=starts)


def _times(problem: Problem, down: float) -> tuple[list[float], list[float], float]:
    """Return when the first microbatch's F and I would start in each stage, and when the next one follows."""
    ranks, stages = problem.ranks, problem.stages
    per_rank, size = stages // ranks, problem.size
    forward, backward, weight = (sum(problem.time[k * size : (k + 1) * size]) / size for k in range(3))
    slot = forward + backward + weight
    hop = sum(problem.wires[0][:2]) if ranks > 1 else 0.0
    least = min(max(forward, backward) + hop, slot / 2)
    down_takes = least + down * (slot - 2 * least)
    rests = _rests(ranks, per_rank)
    forward_at, input_at, now = [0.0] * stages, [0.0] * stages, 0.0
    for leg in range(2 * per_rank):
        first = leg * ranks if leg < per_rank else (2 * per_rank - leg) * ranks - 1
        for step in range(ranks):
            if step:
                now += down_takes if leg % 2 == 0 else slot - down_takes
            if leg < per_rank:
                forward_at[first + step] = now
            else:
                input_at[first - step] = now
        if leg < len(rests):
            now += slot / 2 + rests[leg] * slot
    return forward_at, input_at, per_rank * slot or 1.0  # any will do if nothing takes time


def _restless(problem: Problem, pace: float, rooms: list[float]) -> tuple[list[float], list[float], float]:
    """Return the same of microbatches that never wait, as many as fill the memory of a rank."""
    count, size, now = problem.microbatches, problem.size, 0.0
    starts = [0.0] * (2 * problem.stages)
    x, last = 0, size
    while x >= 0:  # along the first microbatch's way
        starts[x // count] = now
        now += problem.time[x] + sum(problem.wires[x][:2])
        x = problem.feeds[x] if x != last else -1
    forward_at, input_at = starts[: problem.stages], starts[problem.stages :]
    period = problem.busiest
    for rank, room in enumerate(rooms):
        area = 0.0
        for stage in problem.placement.stages_of(rank):
            end = input_at[stage] + problem.time[size + stage * count] + problem.time[2 * size + stage * count]
            area += problem.most[stage] * (end - forward_at[stage])
        period = max(period, area / room)
    return forward_at, input_at, pace * period or 1.0


@cache
def _rests(ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return whole slots of rest at each turn: the fewest that put legs of one direction in slots of their own.

    From one leg to the next but one pass as many slots as a leg has hops, one for the two turns, and the rests.
    """
    turns = 2 * per_rank - 1

    def placed(rests: tuple[int, ...], slots: tuple[int, ...], left: int) -> tuple[int, ...] | None:
        leg = len(rests) + 1  # The next leg to place.
        if leg > turns:
            return rests
        for rest in range(left + 1):
            slot = slots[leg - 2] + ranks + rests[-1] + rest if leg > 1 else 0
            if all((slot - other) % per_rank for other in slots[leg % 2 :: 2]):
                found = placed((*rests, rest), (*slots, slot), left - rest)
                if found is not None:
                    return found
        return None

    for left in range(per_rank * turns):
        found = placed((), (0,), left)
        if found is not None:
            return found
    return (0,) * turns


def _quotas(
    problem: Problem, rhythm: Rhythm, rooms: list[float], times: tuple[list[float], list[float], float]
) -> list[int]:
    """Return how many microbatches each stage may hold."""
    forward_at, input_at, period = times
    if rhythm.slack is not None:
        return [
            max(1, math.ceil((end - start) / period + rhythm.slack - EPSILON))
            for start, end in zip(forward_at, input_at, strict=True)
        ]
    quotas = [1 if most else problem.microbatches for most in problem.most]
    for rank in range(problem.ranks):
        stages = problem.placement.stages_of(rank)
        room = rooms[rank]
        if room == math.inf:
            room = sum(problem.most[stage] for stage in stages) * problem.microbatches
        shares = [(problem.stages - stage - 0.5) ** rhythm.shape for stage in stages]
        left = room - sum(problem.most[stage] for stage in stages)
        while True:  # one more for the stage that is furthest below its share
            open_to = [
                (quotas[stage] / share, stage)
                for stage, share in zip(stages, shares, strict=True)
                if 0 < problem.most[stage] <= left and quotas[stage] < problem.microbatches
            ]
            if not open_to:
                break
            _, stage = min(open_to)
            quotas[stage] += 1
            left -= problem.most[stage]
    return quotas
