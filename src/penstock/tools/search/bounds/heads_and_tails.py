"""Lower bounds from when the n-th microbatch can be somewhere at the earliest, and what must still follow it.

Microbatches are alike, so what is bounded is the n-th in order at each place, whichever it is:

head    The n-th F of a stage starts after the n-th F of the stage before and its message, after its own (n-1)-th F,
        and after memory has room for it, which is what paces a pipeline under a low cap (`Limit`). I in turn waits
        for the I of the stage after, and the first of them for F.
tail    The same backwards in time: what must follow the n-th last one.

A rank, and an ordered pair of ranks whose messages queue, do one thing at a time. For one such machine and jobs with
heads and tails, no order ends before the one that always runs the ready job with the longest tail, interrupted when a
longer one becomes ready (Jackson's preemptive rule). The largest such end over all machines is the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.bounds.memory_limits import Limit, limits_of

# Microbatch-stages up to which machines are looked at, and heads and tails.
FEW, MANY = 8_000, 40_000
ROUNDING = 1e-9

Job = tuple[float, float, float]  # head, length, tail


def paced_bound(placement: Placement, count: int, costs: Costs, caps: Sequence[float]) -> float:
    """Return a time that no schedule of the placement can beat; 0 where it would take too long to find."""
    if placement.stages * count > MANY:
        return 0.0
    pipe = _Pipe.of(placement, count, costs, caps)
    heads, tails = _heads(pipe), _tails(pipe)
    jobs = [*_jobs(pipe, heads, tails)]
    bound = max(head + length + tail for _, (head, length, tail) in jobs)
    if placement.stages * count > FEW:
        return bound
    machines: dict[object, list[Job]] = {}
    for machine, job in jobs:
        machines.setdefault(machine, []).append(job)
    return max(bound, *map(_preemptive, machines.values()))


class _Pipe(NamedTuple):
    """A chain of stages, by stage; links by the stage before them."""

    microbatches: int
    home: Sequence[int]
    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    ahead: list[tuple[float, float]]  # (time on the link, delay)
    back: list[tuple[float, float]]
    limits: list[list[Limit]]
    partly: list[tuple[float, float, float] | None]  # (cap, activation, held) where I gives back a part

    @classmethod
    def of(cls, placement: Placement, count: int, costs: Costs, caps: Sequence[float]) -> _Pipe:
        home, stages = placement.by_stage, placement.stages
        forward, _, backward, weight = costs.by_op(stages)
        activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
        free = (0.0, 0.0)
        edges = list(pairwise(range(stages)))
        ahead = [free if home[a] == home[b] else costs.wire(a, b, (home[a], home[b])) for a, b in edges]
        back = [free if home[a] == home[b] else costs.wire(a, b, (home[b], home[a])) for a, b in edges]
        steps = (backward[stage + 1] + sum(back[stage]) for stage in reversed(range(stages - 1)))
        away = [*accumulate(steps, initial=0.0)][::-1]  # By stage: how long its I starts after the last one.
        limits: list[list[Limit]] = [[] for _ in range(stages)]
        for rank, cap in enumerate(caps):
            for stage, limit in limits_of(placement.stages_of(rank), costs, away, cap * (1 + ROUNDING)):
                if limit.most < count:
                    limits[stage].append(limit)
        return cls(
            count,
            home,
            forward,
            backward,
            weight,
            ahead,
            back,
            limits,
            [_partly(caps[home[stage]], sizes) for stage, sizes in enumerate(zip(activation, held, strict=True))],
        )


def _partly(cap: float, sizes: tuple[float, float]) -> tuple[float, float, float] | None:
    activation, held = sizes
    return (cap * (1 + ROUNDING), activation, held) if 0 < held < activation and cap < math.inf else None


def _made_room(pipe: _Pipe, stage: int, inputs: list[float], weights: list[float]) -> float:
    """Return when the next F of a stage finds room at the earliest, where I gives back a part of it and W the rest.

    With i of its I done it needs so many W, and with more I fewer W: the best of these choices.
    """
    limit, n = pipe.partly[stage], len(inputs)
    if limit is None:
        return 0.0
    cap, activation, held = limit
    best = math.inf
    for i in range(max(0, n + 1 - math.floor(cap / activation)), n + 1):
        by_input = inputs[i - 1] + pipe.input[stage] if i else 0.0
        if by_input >= best:
            break
        w = max(0, math.ceil((activation * (n + 1 - i) + held * i - cap) / held))
        if w <= i:
            best = min(best, max(by_input, weights[w - 1] + pipe.weight[stage] if w else 0.0))
    return best if best < math.inf else 0.0


class _Times(NamedTuple):
    """By stage and place in the order: of F, of I, of W, and of the messages ahead and back.

    Of heads, when each starts at the earliest; of tails, what follows its end at least, counted from the last one.
    """

    forward: list[list[float]]
    input: list[list[float]]
    weight: list[list[float]]
    ahead: list[list[float]]
    back: list[list[float]]


def _blank(stages: int) -> _Times:
    forward, backward, weight, ahead, back = ([[0.0][:0] for _ in range(stages)] for _ in range(5))
    return _Times(forward, backward, weight, ahead, back)


def _after(times: list[float], length: float) -> float:
    """Return when the one before in the same place is over."""
    return times[-1] + length if times else 0.0


def _heads(pipe: _Pipe) -> _Times:
    stages = len(pipe.home)
    found = _blank(stages)
    forward, backward, weight, ahead, back = found
    for n in range(pipe.microbatches):
        arrival = 0.0
        for s in range(stages):
            start = max(arrival, _after(forward[s], pipe.forward[s]), _made_room(pipe, s, backward[s], weight[s]))
            for most, stage, longer, by_weight in pipe.limits[s]:
                if n >= most:
                    times, length = (weight, pipe.weight) if by_weight else (backward, pipe.input)
                    start = max(start, times[stage][n - most] + length[stage] + longer)
            forward[s].append(start)
            if s + 1 < stages:
                time, delay = pipe.ahead[s]
                ahead[s].append(max(start + pipe.forward[s], _after(ahead[s], time)))
                arrival = ahead[s][-1] + time + delay
        arrival = forward[-1][n] + pipe.forward[-1]
        for s in reversed(range(stages)):
            start = max(arrival, _after(backward[s], pipe.input[s]))
            backward[s].append(start)
            weight[s].append(max(start + pipe.input[s], _after(weight[s], pipe.weight[s])))
            if s:
                time, delay = pipe.back[s - 1]
                back[s - 1].append(max(start + pipe.input[s], _after(back[s - 1], time)))
                arrival = back[s - 1][-1] + time + delay
    return found


def _tails(pipe: _Pipe) -> _Times:
    stages = len(pipe.home)
    mirrored: list[list[tuple[int, int, float, bool]]] = [[] for _ in range(stages)]
    for source, limits in enumerate(pipe.limits):
        for most, stage, longer, by_weight in limits:
            mirrored[stage].append((source, most, longer, by_weight))
    found = _blank(stages)
    forward, backward, weight, ahead, back = found
    for n in range(pipe.microbatches):
        rest = 0.0
        for s in range(stages):
            done = _after(weight[s], pipe.weight[s])
            tail = max(rest, _after(backward[s], pipe.input[s]))
            for source, most, longer, by_weight in mirrored[s]:
                if n >= most:
                    before = forward[source][n - most] + pipe.forward[source] + longer
                    done, tail = (max(done, before), tail) if by_weight else (done, max(tail, before))
            weight[s].append(done)
            backward[s].append(max(tail, done + pipe.weight[s]))
            if s + 1 < stages:
                time, delay = pipe.back[s]
                back[s].append(max(backward[s][-1] + pipe.input[s] + delay, _after(back[s], time)))
                rest = back[s][-1] + time
        rest = backward[-1][n] + pipe.input[-1]
        for s in reversed(range(stages)):
            tail = max(rest, _after(forward[s], pipe.forward[s]))
            forward[s].append(tail)
            if s:
                time, delay = pipe.ahead[s - 1]
                ahead[s - 1].append(max(tail + pipe.forward[s] + delay, _after(ahead[s - 1], time)))
                rest = ahead[s - 1][-1] + time
    return found


def _jobs(pipe: _Pipe, heads: _Times, tails: _Times) -> Iterator[tuple[object, Job]]:
    """Yield (machine, job): a rank's computes, and the messages of an ordered pair of ranks where they queue."""
    stages, home = len(pipe.home), pipe.home
    lengths = (pipe.forward, pipe.input, pipe.weight)
    kinds = [(home[s], lengths[op][s], heads[op][s], tails[op][s]) for op in range(3) for s in range(stages)]
    queues = [
        ((home[s], home[s + 1])[::way], links[s][0], heads[op][s], tails[op][s])
        for op, links, way in ((3, pipe.ahead, 1), (4, pipe.back, -1))
        for s in range(stages - 1)
        if links[s][0]
    ]
    machines: list[tuple[object, float, list[float], list[float]]] = [*kinds, *queues]
    for machine, length, starts, rests in machines:
        for head, tail in zip(starts, reversed(rests), strict=True):
            yield machine, (head, length, tail)


def _preemptive(jobs: list[Job]) -> float:
    """Return the end of the order that always runs the ready job with the longest tail, tails included."""
    jobs.sort()
    ready: list[list[float]] = []  # (minus the tail, what is left)
    now = end = 0.0
    place = 0
    while place < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[place][0])
        while place < len(jobs) and jobs[place][0] <= now:
            _, length, tail = jobs[place]
            heapq.heappush(ready, [-tail, length])
            place += 1
        tail, left = ready[0]
        until = jobs[place][0] if place < len(jobs) else math.inf
        if now + left <= until:
            now += left
            end = max(end, now - tail)
            heapq.heappop(ready)
        else:
            ready[0][1] = left - (until - now)
            now = until
    return end
