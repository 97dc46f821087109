"""A period that no schedule can beat where steps overlap: what a rank has to do, and what memory lets it do meanwhile.

Two times of a rank are fixed by how long one microbatch takes on its way, whatever the order is:

boundary   From the rank's last F to its first F of the next step. The last F is of its last stage; that microbatch
           then goes to the last stage of all and all the way back, the first rank runs its W and begins the next
           step, and the first microbatch of that comes to the rank's first stage. All that the rank can run
           meanwhile are the I and W of what it holds.

fill       From its first F to its first I: the way from its first stage to the last one of all, and back to its own
           last stage. All that it can run meanwhile are F, as many as it can hold.

If a rank can hold less than what would fill one of these times, it idles for the rest, in every step. Both rests
count where the times lie apart. They do if an F comes after the first I, and so wherever memory cannot hold all F of
the step. Where it can, all F may come first: then the boundary begins before the fill ends, idle time may be of both,
and only the longer rest counts. With p equal ranks on a V of an even number v of legs, whole-rank times F, I, W, hops c
and memory for p of more than p microbatches, the last rank idles for

    (p - 1) (F + I) / v + W / v + 2 (v + 1) (p - 1) c - p W

in both together, where both are longer than what it can run. More legs make the first term smaller and the hops more.
"""

from __future__ import annotations

import math

from penstock.schedule.builders.problem import Problem


def steady_bound(problem: Problem) -> float:
    """Return the least period of overlapping steps."""
    return max(_rank_bound(problem, rank) for rank in range(problem.ranks))


def _rank_bound(problem: Problem, rank: int) -> float:
    count, size, stages = problem.microbatches, problem.size, problem.placement.stages_of(rank)
    first, last = stages[0], stages[-1]
    forward, backward, weight = (
        [problem.time[half * size + stage * count] for stage in range(problem.stages)] for half in range(3)
    )
    hops, hops_back = (
        [sum(problem.wires[half * size + stage * count][:2]) for stage in range(problem.stages)] for half in range(2)
    )
    boundary = sum(hops[last:]) + sum(forward[last + 1 :]) + sum(backward) + sum(hops_back)
    boundary += weight[0] + sum(forward[:first]) + sum(hops[:first])
    fill = sum(forward[first:]) + sum(hops[first:]) + sum(backward[last + 1 :]) + sum(hops_back[last + 1 :])
    cap = problem.caps[rank]
    held = [_rate(backward[s] + weight[s], problem.most[s]) for s in stages]
    held += [_rate(weight[s], problem.held[s]) for s in stages]  # Their I has run.
    work = [count * sum(times[s] for s in stages) for times in (forward, backward, weight)]
    ends = min(work[1] + work[2], _most(cap, max(held)))
    starts = min(work[0], _most(cap, max(_rate(forward[s], problem.most[s]) for s in stages)))
    rests = max(0.0, boundary - ends), max(0.0, fill - starts)
    apart = count * sum(problem.most[s] for s in stages) > cap  # an F comes after the first I
    return sum(work) + (sum(rests) if apart else max(rests))


def _most(cap: float, rate: float) -> float:
    return cap * rate if rate else 0.0


def _rate(time: float, memory: float) -> float:
    """Work per memory that it holds; endless where it holds none."""
    return time / memory if memory > 0 else math.inf if time else 0.0
