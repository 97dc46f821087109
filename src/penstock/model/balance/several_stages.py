"""Cutting where ranks have several stages: loop and V placements, and any map of the user's own.

    improve   any run of stages on different ranks is the classic problem, if the ranks' other
              stages are held still: solve such runs in turn until none gets better, shake, repeat
    prove     two rounds of stages, loop or V: the sweep of `two_stages`; anything else: a
              depth-first search for something better, cut off where the work that is left exceeds
              the room that is left, and handed to the classic solver as soon as the stages that
              are left lie on different ranks

A proof that finds something better gives improving a new start. It has a budget of steps: small
problems end within it and are exact. For larger ones the best cut found is the answer, and says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from penstock.model.balance.partition import ROUNDING, Ends, PartitionProblem, Stretch, classic
from penstock.model.balance.two_stages import Verdict, takes, two_rounds

SHAKES = 16
SHAKE_WORK = 50_000  # atoms x stages x shakes: fewer shakes for the largest
CLOSE = 1e-4
STEPS = 600_000  # of one search: less than a second
BETTER = 1 - 3 * ROUNDING


def lightest(problem: PartitionProblem, slack: float = 0.0) -> tuple[Ends, bool]:
    """The best cut found, and whether its largest load is proved to be the least.

    Loads within `slack` of the best count as equal, and bytes decide.
    """
    count = problem.stages
    speeds = tuple(problem.speeds[rank] for rank in problem.ranks)
    ranks, loads = tuple(range(count)), (0.0,) * count
    ends = _improve(problem, classic(PartitionProblem(problem.sums, ranks, loads, speeds, problem.crossing)))
    ends = _bisect(problem, ends) if takes(problem) else _shake(problem, ends)
    ends, exact = _settle(problem, ends)
    bound = max(problem.loads(ends)) * (1 + slack)
    ends = _fewer_bytes(problem, ends, bound)
    return _Search(problem, bound, ends).run(problem.bytes(ends)) or ends, exact


def _bisect(problem: PartitionProblem, best: Ends) -> Ends:
    """For two rounds: halve the gap between what is known and what cannot be, with the quick sweep."""
    low = _floor(problem)
    while (high := max(problem.loads(best))) - low > CLOSE * high:
        found = two_rounds(problem, (low + high) / 2, STEPS, quick=True)[1]
        if found is None:
            low = (low + high) / 2
        else:
            best = found
    return best


def _shake(problem: PartitionProblem, best: Ends) -> Ends:
    """Move some cuts, improve again, keep the best."""
    chance = random.Random(0)
    for _ in range(min(SHAKES, 1 + SHAKE_WORK // (problem.atoms * problem.stages))):
        if max(problem.loads(best)) <= _floor(problem) * (1 + ROUNDING):
            break
        ends = _improve(problem, _shaken(best, chance))
        if max(problem.loads(ends)) < max(problem.loads(best)):
            best = ends
    return best


def _settle(problem: PartitionProblem, best: Ends) -> tuple[Ends, bool]:
    """Look for something better until there is none, or until the budget is spent."""
    while max(problem.loads(best)) > _floor(problem) * (1 + ROUNDING):
        bound = max(problem.loads(best)) * BETTER
        verdict, found = two_rounds(problem, bound, STEPS) if takes(problem) else (Verdict.UNKNOWN, None)
        if verdict is Verdict.UNKNOWN:
            search = _Search(problem, bound, best)
            found = search.run(None)
            verdict = Verdict.NONE if search.left > 0 else Verdict.UNKNOWN
        if found is None:
            return best, verdict is Verdict.NONE
        best = _improve(problem, found)
    return best, True


def _floor(problem: PartitionProblem) -> float:
    """No cut is lighter: the whole shared out evenly; and the heaviest atom with the lightest beside it."""
    carried = sum(base * speed for base, speed in zip(problem.base, problem.speeds, strict=True))
    even = (problem.least[0] + carried) / sum(problem.speeds)
    atoms = sorted(min(sums[n + 1] - sums[n] for sums in problem.sums) for n in range(problem.atoms))
    others = min(problem.ranks.count(rank) for rank in problem.ranks) - 1  # stages of its rank, each with an atom
    floor = max(even, atoms[-1] + sum(atoms[:others]), *problem.base)
    return math.ceil(floor / problem.grain) * problem.grain if problem.grain else floor


def _improve(problem: PartitionProblem, ends: Ends) -> Ends:
    """Solve every run of stages on different ranks, the others held still, until none gets better."""
    runs = _runs(problem.ranks)
    again = True
    while again:
        again = False
        for stages in runs:
            run, now = _held_still(problem, ends, stages)
            if run.fits(now * BETTER):
                found = run.cheapest(run.least_bound(now))
                changed = ends if found is None else [*ends[: stages.start + 1], *found[1], *ends[stages.stop :]]
                if _held_still(problem, changed, stages)[1] < now:
                    ends, again = changed, True
    return ends


def _fewer_bytes(problem: PartitionProblem, ends: Ends, bound: float) -> Ends:
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


def _held_still(problem: PartitionProblem, ends: Ends, stages: range) -> tuple[Stretch, float]:
    """The run of `stages`, and its ranks' largest load now."""
    loads = problem.loads(ends)
    now = max(loads[problem.ranks[stage]] for stage in stages)
    for stage in stages:
        loads[problem.ranks[stage]] -= problem.sums[stage][ends[stage + 1]] - problem.sums[stage][ends[stage]]
    return Stretch(problem, stages, ends[stages.start], ends[stages.stop], loads), now


def _shaken(ends: Ends, chance: random.Random) -> Ends:
    """Some cuts moved a little way, where that leaves every stage an atom."""
    ends = list(ends)
    for place in range(1, len(ends) - 1):
        if chance.random() < 0.6:
            moved = ends[place] + chance.choice((-3, -2, -1, 1, 2, 3))
            if ends[place - 1] < moved < ends[place + 1]:
                ends[place] = moved
    return ends


class _Search:
    """Depth first over the ends of stages; `left` counts down the steps, 0 means it was cut off."""

    def __init__(self, problem: PartitionProblem, bound: float, near: Ends) -> None:
        self.problem = problem
        self.bound = bound * (1 + ROUNDING)
        self.near = near
        self.left = STEPS
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
        """Try all ends of this stage and of those after it; True ends the search."""
        problem, start = self.problem, ends[-1]
        self.left -= 8
        if self.left <= 0:
            return True
        if stage >= self.alone:
            self.left -= (problem.stages - stage) * (problem.atoms - start)
            run = Stretch(problem, range(stage, problem.stages), start, problem.atoms, self.loads)
            bound = self.bound / (1 + ROUNDING)
            found = None
            if run.fits(bound):
                self.left -= (problem.atoms - start) ** 2
                found = run.cheapest(bound)
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
