"""How placements share what a search may spend: builders first, then the first rules of each by turns, then draws."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush

from penstock.schedule.builders.problem import ROUNDING
from penstock.tools.search.budget import Budget
from penstock.tools.search.placement_search import PlacementSearch
from penstock.tools.search.request import Progress

BEHIND = {2: 1.08, 3: 1.03}  # So far behind after so many rules, a placement gets no more of them.


def explore(
    searches: Sequence[PlacementSearch], budget: Budget, generator: random.Random, progress: Progress | None
) -> PlacementSearch:
    """Search all placements until the budget is spent or nothing can be better; return the one that leads."""
    with without_collecting():
        return _Shared(searches, budget, progress).run(generator)


class _Shared:
    """What a search may spend, and the placements that share it."""

    def __init__(self, searches: Sequence[PlacementSearch], budget: Budget, progress: Progress | None) -> None:
        self.searches, self.budget, self.progress = searches, budget, progress
        self.bound = min(each.bound for each in searches)

    @property
    def best(self) -> PlacementSearch:
        """The placement that leads; of equals, the one with the fewest stages."""
        leader = self.searches[0]
        for each in self.searches[1:]:
            if each.value < leader.value * (1 - ROUNDING):
                leader = each
        return leader

    def run(self, generator: random.Random) -> PlacementSearch:
        """Try the builders, then the first rules, then what is drawn."""
        promising = sorted(self.searches, key=lambda each: each.bound)
        for each in promising:  # a promise, so whatever the budget: never worse than any family
            if each.can_beat(self.best.value):
                for _ in each.builders(lambda: self.best.value):
                    self._report()
        # a good bound is not yet a good order, so all have their turns; two of few stages take as long as one of many
        waiting = [(each.problem.size, place, 0, each.rules()) for place, each in enumerate(promising)]
        while waiting:
            _, place, tried, rules = heappop(waiting)
            each = promising[place]
            if self._worth(each, tried) and next(rules, None) is not None:
                self._report()
                heappush(waiting, ((tried + 2) * each.problem.size, place, tried + 1, rules))
        while self.budget.limit and (left := self._open()):
            leaders = sorted(left, key=lambda each: each.value)
            steepness = 0.7 if leaders[0].small else 1.5  # small ones can afford to look at the others too
            leaders[min(int(generator.expovariate(steepness)), len(leaders) - 1)].step()
            self._report()
        return self.best

    def _worth(self, each: PlacementSearch, tried: int) -> bool:
        """Return whether another of the first rules is worth what it takes here; without an answer yet, it is."""
        best = self.best.value
        if self.budget.limit and not each.small and each.value > BEHIND.get(min(tried, 3), math.inf) * best:
            return False
        if best == math.inf:
            return True
        if each.bound >= best * (1 - ROUNDING):
            return False
        if each is self.best and tried < min(BEHIND) and not each.large:
            return True  # Else a family built for the costs could be ahead.
        return each.rule_takes < self.budget.left if self.budget.limit else not each.large

    def _open(self) -> list[PlacementSearch]:
        """Return the placements that can still win, and are not too large for what is left."""
        value, left = self.best.value, self.budget.left
        return [
            each
            for each in self.searches
            if left > 0 and each.bound < value * (1 - ROUNDING) and each.rule_takes < left and not each.problem.lack
        ]

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.budget.spent, self.best.value, self.bound)


@contextmanager
def without_collecting() -> Iterator[None]:
    """Stop the garbage collector where there are no cycles: it would look through all that is there again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
