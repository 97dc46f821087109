"""Contiguous partition so that the most loaded rank is as light as can be: the search behind `balance`.

The classic wrong turns are to even out differences, or to subtract the minimum: both can leave a
stage much heavier than it need be. Here one question is asked, and answered exactly: can all loads
stay within a bound? Where every rank has one stage, sweeping the reachable ends of each stage from
the first to the last answers it, and bisection over the bound gives the optimum.

Where ranks have several stages (loop, V, any map), a rank's load is a sum over stages that stand far
apart, and no sweep decides it. Then:

    improve   any run of stages on different ranks is the classic problem, if the ranks' other
              stages are held still: solve such runs in turn until none gets better, shake, repeat
    prove     a depth-first search for anything better, cut off where the work that is left
              exceeds the room that is left, and handed to the classic solver as soon as the
              stages that are left lie on different ranks

The proof has a budget of nodes. Small problems end within it and are exact; for larger ones the
best cut found is returned, and `Partition.exact` says so. Sums are compared to one part in 10^9.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

__all__ = ["Partition", "Problem", "solve"]

ROUNDING = 1e-9
BISECTIONS = 60
SHAKES = 24
NODES = 40_000  # of the depth-first search: about a second

Ends = list[int]  # the boundaries between stages, with 0 and the number of atoms at both ends


@dataclass(frozen=True)
class Partition:
    """The cuts, what they leave on the ranks, and whether that is known to be the best there is."""

    cuts: tuple[int, ...]
    loads: tuple[float, ...]  # by rank
    crossing: float
    exact: bool

    @property
    def largest(self) -> float:
        """The load of the rank that all others wait for."""
        return max(self.loads)


@dataclass(frozen=True)
class Problem:
    """Atoms, which no cut takes apart, to be dealt out to stages in order."""

    sums: tuple[list[float], ...]  # by stage: what the first n atoms weigh there, on its rank
    ranks: tuple[int, ...]  # by stage
    base: tuple[float, ...]  # by rank: load that it has anyway
    speeds: tuple[float, ...]  # by rank
    crossing: tuple[float, ...]  # by boundary: bytes that cross a cut there
    walls: tuple[int, ...]  # by boundary: the next one after it at which a cut must be

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


def solve(problem: Problem, slack: float = 0.0) -> Partition | None:
    """The best cut, None where there is none; loads within `slack` of the best count as equal, and bytes decide."""
    whole = Run(problem, range(problem.stages), 0, problem.atoms, problem.base)
    if problem.single:
        most = max(sums[-1] for sums in problem.sums) + max(problem.base)
        if not whole.fits(most):
            return None
        found = whole.cheapest(whole.least_bound(most) * (1 + slack))
        assert found is not None
        return _answer(problem, [0, *found[1], problem.atoms], exact=True)
    ends = _begin(problem)
    if ends is None:
        return None
    ends, exact = _lightest(problem, ends)
    bound = max(problem.loads(ends)) * (1 + slack)
    ends = _fewer_bytes(problem, ends, bound)
    search = _Search(problem, bound, ends, NODES)
    better = search.run(problem.bytes(ends))
    return _answer(problem, better or ends, exact and search.left > 0)


def _answer(problem: Problem, ends: Ends, exact: bool) -> Partition:
    return Partition(tuple(ends[1:-1]), tuple(problem.loads(ends)), problem.bytes(ends), exact)


def _begin(problem: Problem) -> Ends | None:
    """A cut to start from: each stage as if it had a rank of its own."""
    count = problem.stages
    speeds = tuple(problem.speeds[rank] for rank in problem.ranks)
    alone = Problem(problem.sums, tuple(range(count)), (0.0,) * count, speeds, problem.crossing, problem.walls)
    found = solve(alone)
    return None if found is None else [0, *found.cuts, problem.atoms]


def _lightest(problem: Problem, ends: Ends) -> tuple[Ends, bool]:
    """The lowest largest load that improving, shaking and searching find; and whether it is proved."""
    chance = random.Random(0)
    best = ends = _improve(problem, ends)
    goal = _floor(problem)
    for _ in range(SHAKES):
        if max(problem.loads(best)) <= goal * (1 + ROUNDING):
            return best, True
        ends = _improve(problem, _shaken(best, chance, problem))
        if max(problem.loads(ends)) < max(problem.loads(best)):
            best = ends
    while True:
        search = _Search(problem, max(problem.loads(best)) * (1 - 3 * ROUNDING), best, NODES)
        found = search.run(None)
        if found is None:
            return best, search.left > 0
        best = _improve(problem, found)


def _floor(problem: Problem) -> float:
    """No cut is lighter: the whole shared out evenly, and the heaviest atom wherever it is cheapest."""
    carried = sum(base * speed for base, speed in zip(problem.base, problem.speeds, strict=True))
    even = (problem.least[0] + carried) / sum(problem.speeds)
    atom = max(min(sums[n + 1] - sums[n] for sums in problem.sums) for n in range(problem.atoms))
    return max(even, atom, *problem.base)


def _improve(problem: Problem, ends: Ends) -> Ends:
    """Solve every run of stages on different ranks, the others held still, until none gets better."""
    runs = _runs(problem.ranks)
    again = True
    while again:
        again = False
        for stages in runs:
            run, now = _held_still(problem, ends, stages)
            if run.fits(now * (1 - 3 * ROUNDING)):
                found = run.cheapest(run.least_bound(now))
                if found is not None:
                    ends = [*ends[: stages.start + 1], *found[1], *ends[stages.stop :]]
                    again = True
    return ends


def _fewer_bytes(problem: Problem, ends: Ends, bound: float) -> Ends:
    """The same with bytes: within the bound, fewer of them."""
    for stages in _runs(problem.ranks) * 2:
        run, _ = _held_still(problem, ends, stages)
        found = run.cheapest(bound)
        if found is not None:
            changed = [*ends[: stages.start + 1], *found[1], *ends[stages.stop :]]
            if problem.bytes(changed) < problem.bytes(ends):
                ends = changed
    return ends


def _runs(ranks: Sequence[int]) -> list[range]:
    """The longest runs of stages on different ranks, from each stage on; at least two stages long."""
    found: list[range] = []
    for first in range(len(ranks)):
        end = first
        while end < len(ranks) and ranks[end] not in ranks[first:end]:
            end += 1
        if end - first > 1:
            found.append(range(first, end))
    return found


def _held_still(problem: Problem, ends: Ends, stages: range) -> tuple[Run, float]:
    """The run of `stages`, and its ranks' largest load now."""
    loads = problem.loads(ends)
    now = max(loads[problem.ranks[stage]] for stage in stages)
    for stage in stages:
        loads[problem.ranks[stage]] -= problem.sums[stage][ends[stage + 1]] - problem.sums[stage][ends[stage]]
    return Run(problem, stages, ends[stages.start], ends[stages.stop], loads), now


def _shaken(ends: Ends, chance: random.Random, problem: Problem) -> Ends:
    """Some cuts moved a little way, where that leaves every stage an atom and no wall behind."""
    ends = list(ends)
    for place in range(1, len(ends) - 1):
        if chance.random() < 0.6 and ends[place] not in problem.walls:
            moved = ends[place] + chance.choice((-3, -2, -1, 1, 2, 3))
            if ends[place - 1] < moved < ends[place + 1]:
                ends[place] = moved
    return ends


class _Search:
    """Depth first over the ends of stages; `left` counts down the nodes, 0 means it was cut off."""

    def __init__(self, problem: Problem, bound: float, near: Ends, nodes: int) -> None:
        self.problem = problem
        self.bound = bound * (1 + ROUNDING)
        self.near = near
        self.left = nodes
        self.fewest: float | None = None
        self.best: Ends | None = None
        self.loads = list(problem.base)
        self.hopeless: set[tuple[int, int, tuple[float, ...]]] = set()
        self.alone = problem.stages  # from this stage on, all lie on different ranks
        while self.alone and problem.ranks[self.alone - 1] not in problem.ranks[self.alone :]:
            self.alone -= 1

    def run(self, fewest: float | None) -> Ends | None:
        """A cut within the bound: any one, or the one with the fewest bytes below `fewest`."""
        self.fewest = fewest
        self._from(0, [0], 0.0)
        return self.best

    def _from(self, stage: int, ends: Ends, crossed: float) -> bool:
        """Try all from here; True ends the search."""
        problem, start = self.problem, ends[-1]
        self.left -= 1
        if self.left <= 0:
            return True
        if stage >= self.alone:
            run = Run(problem, range(stage, problem.stages), start, problem.atoms, self.loads)
            found = run.cheapest(self.bound / (1 + ROUNDING))
            if found is None or (self.fewest is not None and crossed + found[0] >= self.fewest):
                return False
            self.best = [*ends, *found[1], problem.atoms]
            wanted, self.fewest = self.fewest, crossed + found[0]
            return wanted is None
        return self._ends_of(stage, ends, crossed)

    def _ends_of(self, stage: int, ends: Ends, crossed: float) -> bool:
        problem, start, rank = self.problem, ends[-1], self.problem.ranks[stage]
        open_ranks = set(problem.ranks[stage:])
        room = sum((self.bound - self.loads[other]) * problem.speeds[other] for other in open_ranks)
        key = (stage, start, tuple(round(self.loads[other], 9) for other in sorted(open_ranks)))
        if problem.least[start] > room or (self.fewest is None and key in self.hopeless):
            return False
        before, sums = self.loads[rank], problem.sums[stage]
        last = min(problem.reach(stage, start, self.bound - before), problem.atoms - (problem.stages - 1 - stage))
        hint = self.near[stage + 1]
        for end in sorted(range(start + 1, last + 1), key=lambda end: abs(end - hint)):
            spent = crossed + problem.crossing[end]
            if self.fewest is not None and spent + problem.fewest_bytes[problem.stages - 2 - stage] >= self.fewest:
                continue
            self.loads[rank] = before + sums[end] - sums[start]
            stop = self._from(stage + 1, [*ends, end], spent)
            self.loads[rank] = before
            if stop:
                return True
        if len(self.hopeless) < 200_000:
            self.hopeless.add(key)
        return False
