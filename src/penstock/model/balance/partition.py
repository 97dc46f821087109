"""Where to cut: from what the pieces of a model weigh to stages that keep no rank waiting.

A pipeline runs at the pace of its most loaded rank, so that load is what a cut minimises; a rank's load is the sum over
its stages, divided by its speed. Among equally good cuts the one that fewer bytes cross is taken, then the evener.
The problem is posed in `problem` and solved in `sweep`; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.model.balance.problem import Weights, pose
from penstock.model.balance.sweep import lightest
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Partition:
    """The cuts, what they leave on the ranks, and whether that is known to be the best there is."""

    cuts: tuple[int, ...]  # the numbers of the first pieces of stages 1, 2, ...
    loads: tuple[float, ...]  # Indexed by rank.
    crossing: float
    exact: bool  # no cut has a lighter most loaded rank; else it is the best that was found

    @property
    def largest(self) -> float:
        """The load of the rank that all others wait for."""
        return max(self.loads)


def partition(
    weights: Weights,
    stages: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    placement: Placement | None = None,
    speeds: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Partition:
    """Find the cut with the lightest most loaded rank: where it is, and what it leaves on the ranks.

    weights    what each piece weighs, or one row of that for each stage (`profile.memory_rows`)
    allowed    pieces before which a cut may be; without it, any
    crossing   bytes that cross a cut before each piece: decides among equals
    placement  which rank has which stage; without it, each stage has its own
    speeds     of the ranks: 0.5 takes twice as long
    slack      loads within this share of the best count as equal (measured times never quite are)
    """
    problem, places = pose(weights, stages, allowed, crossing, placement, speeds)
    ends, exact = lightest(problem, slack)
    cuts = tuple(places[end] for end in ends[1:-1])
    return Partition(cuts, tuple(problem.loads(ends)), problem.bytes(ends), exact)


def counts_of(cuts: Sequence[int], pieces: int) -> list[int]:
    """Return how many pieces each stage has: what `Pipeline(balance=[...])` takes."""
    return [end - first for first, end in pairwise([0, *cuts, pieces])]


def counts_between(cuts: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the pieces with which a stage may begin, `starts`, each stage has."""
    bounds = [0, *cuts, max((*starts, *cuts), default=0) + 1]
    return tuple(sum(first <= start < end for start in starts) for first, end in pairwise(bounds))


def bytes_across(spans: Iterable[tuple[int, int, float]], pieces: int) -> list[float]:
    """Return the bytes that cross a cut before each piece, and at the end; spans: (first piece, last piece, bytes)."""
    steps = [0.0] * (pieces + 2)
    for first, last, size in spans:
        steps[first + 1] += size
        steps[last + 1] -= size
    return list(accumulate(steps))[: pieces + 1]


def in_flight(schedule: Schedule) -> list[int]:
    """Return the microbatches that each stage holds when its rank holds the most."""
    found = [0] * schedule.stages
    for rank, row in enumerate(schedule.rows):
        held = dict.fromkeys(schedule.placement.stages_of(rank), 0)
        most = 0
        for action in row:
            for part in () if action is None else action.parts():
                if part.op is Op.F:
                    held[part.stage] += 1
                    if sum(held.values()) > most:
                        most = sum(held.values())
                        for stage, number in held.items():
                            found[stage] = number
                elif part.op is Op.B or part.op is Op.W:
                    held[part.stage] -= 1
    return [1] * schedule.stages if schedule.forward_only else found
