"""Contiguous partition so that the most loaded rank is as light as can be: the search behind `balance`.

The classic wrong turns are to even out differences, or to subtract the minimum: both can leave a
stage much heavier than it need be. Here one question is asked, and answered exactly: can all loads
stay within a bound? Where every rank has one stage, sweeping the reachable ends of each stage from
the first to the last answers it, and bisection over the bound gives the optimum.

Where ranks have several stages (loop, V, any map), a rank's load is a sum over stages that stand far
apart, and no sweep decides it: that is `several`. Sums are compared to one part in 10^9.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

__all__ = ["ROUNDING", "Ends", "Problem", "Run", "classic"]

ROUNDING = 1e-9
BISECTIONS = 60

Ends = list[int]  # the boundaries between stages, with 0 and the number of atoms at both ends


@dataclass(frozen=True)
class Problem:
    """Atoms, which no cut takes apart, to be dealt out to stages in order."""

    sums: tuple[list[float], ...]  # by stage: what the first n atoms weigh there, on its rank
    ranks: tuple[int, ...]  # by stage
    base: tuple[float, ...]  # by rank: load that it has anyway
    speeds: tuple[float, ...]  # by rank
    crossing: tuple[float, ...]  # by boundary: bytes that cross a cut there
    walls: tuple[int, ...]  # by boundary: the next one after it at which a cut must be
    grain: float = 0.0  # every load is a multiple of it; 0 where none is known

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def atoms(self) -> int:
        return len(self.crossing) - 1

    def loads(self, ends: Ends) -> list[float]:
        """What each rank carries."""
        found = list(self.base)
        for stage, (first, end) in enumerate(pairwise(ends)):
            found[self.ranks[stage]] += self.sums[stage][end] - self.sums[stage][first]
        return found

    def bytes(self, ends: Ends) -> float:
        return sum(self.crossing[end] for end in ends[1:-1])

    def reach(self, stage: int, first: int, room: float) -> int:
        """The furthest end of a stage that begins at `first` and has that much room."""
        sums = self.sums[stage]
        return min(bisect_right(sums, sums[first] + room) - 1, self.walls[first])

    @cached_property
    def single(self) -> bool:
        """Has every rank one stage?"""
        return len(set(self.ranks)) == len(self.ranks)

    @cached_property
    def least(self) -> list[float]:
        """By boundary: what the atoms from there on weigh at speed 1, on the stages where they weigh least."""
        sides = {id(sums): (sums, self.speeds[rank]) for sums, rank in zip(self.sums, self.ranks, strict=True)}.values()
        steps = [min((sums[n + 1] - sums[n]) * speed for sums, speed in sides) for n in range(self.atoms)]
        found = [0.0] * (self.atoms + 1)
        for n in reversed(range(self.atoms)):
            found[n] = found[n + 1] + steps[n]
        return found

    @cached_property
    def fewest_bytes(self) -> list[float]:
        """By number of cuts: what they cross at the very least."""
        found = [0.0]
        for crossed in sorted(self.crossing[1:-1]):
            found.append(found[-1] + crossed)
        return found


@dataclass(frozen=True)
class Run:
    """Neighbouring stages on different ranks, between two boundaries: a classic problem."""

    problem: Problem
    stages: range
    first: int
    last: int
    before: Sequence[float]  # by rank: load from elsewhere

    def rooms(self, bound: float) -> list[float]:
        ranks = self.problem.ranks
        return [bound * (1 + ROUNDING) - self.before[ranks[stage]] for stage in self.stages]

    def fits(self, bound: float) -> bool:
        """Can every load stay within `bound`? Sweeps the ends that each stage can have."""
        problem, reachable = self.problem, [self.first]
        for left, stage, room in zip(reversed(range(len(self.stages))), self.stages, self.rooms(bound), strict=True):
            if room < 0:
                return False
            ends: list[int] = []
            high = 0
            for start in reachable:
                end = min(problem.reach(stage, start, room), self.last - left)
                ends += range(max(start, high) + 1, end + 1)
                high = max(high, end)
            if not ends:
                return False
            reachable = ends
        return reachable[-1] == self.last

    def least_bound(self, known: float) -> float:
        """The smallest bound that fits, given one that does."""
        ranks = self.problem.ranks
        low, high = max((self.before[ranks[stage]] for stage in self.stages), default=0.0), known
        for _ in range(BISECTIONS):
            if high - low <= ROUNDING / 8 * high:
                break
            middle = (low + high) / 2
            if self.fits(middle):
                high = middle
            else:
                low = middle
        return high

    def cheapest(self, bound: float) -> tuple[float, list[int]] | None:
        """Within `bound`, the cut with the fewest bytes, then the evenest: (bytes, inner boundaries)."""
        problem = self.problem
        table: dict[int, tuple[float, float, tuple[int, ...]]] = {self.first: (0.0, 0.0, ())}
        for left, stage, room in zip(reversed(range(len(self.stages))), self.stages, self.rooms(bound), strict=True):
            grown: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            sums, base = problem.sums[stage], self.before[problem.ranks[stage]]
            for start, (crossed, uneven, inner) in table.items():
                high = min(problem.reach(stage, start, room), self.last - left) if room >= 0 else start
                for end in range(start + 1 if left else max(start + 1, self.last), high + 1):
                    load = base + sums[end] - sums[start]
                    found = (crossed + (problem.crossing[end] if left else 0.0), uneven + load * load)
                    if end not in grown or found < grown[end][:2]:
                        grown[end] = (*found, (*inner, end) if left else inner)
            table = grown
        if self.last not in table:
            return None
        return table[self.last][0], list(table[self.last][2])


def classic(problem: Problem, slack: float = 0.0) -> Ends | None:
    """The best cut where every rank has one stage, None where there is none.

    Loads within `slack` of the best count as equal, and bytes decide.
    """
    whole = Run(problem, range(problem.stages), 0, problem.atoms, problem.base)
    most = max(sums[-1] for sums in problem.sums) + max(problem.base)
    if not whole.fits(most):
        return None
    found = whole.cheapest(whole.least_bound(most) * (1 + slack))
    assert found is not None
    return [0, *found[1], problem.atoms]
