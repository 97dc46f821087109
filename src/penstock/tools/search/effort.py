"""How the placements share what a search may spend."""

from __future__ import annotations

import heapq
import math
import random

from penstock.schedule.builders.problem import ROUNDING
from penstock.tools.search.budget import Budget
from penstock.tools.search.hunt import Hunt
from penstock.tools.search.request import Progress

__all__ = ["Effort"]

BEHIND = {2: 1.08, 3: 1.03}  # after so many rules, a placement gets no more if it is so far behind


class Effort:
    """The budget of a search, and the placements that share it."""

    def __init__(self, hunts: list[Hunt], budget: Budget, progress: Progress | None) -> None:
        self.hunts, self.budget, self.progress = hunts, budget, progress
        self.bound = min(hunt.bound for hunt in hunts)
        self.open = hunts

    @property
    def best(self) -> Hunt:
        """The placement that leads; of equals, the one with the fewest stages."""
        leader = self.hunts[0]
        for hunt in self.hunts[1:]:
            if hunt.value < leader.value * (1 - ROUNDING):
                leader = hunt
        return leader

    def run(self, generator: random.Random) -> Hunt:
        """Search until the budget is spent or nothing can be better."""
        promising = sorted(self.hunts, key=lambda hunt: hunt.bound)
        for hunt in promising:  # a promise, so whatever the budget: never worse than any family
            if hunt.can_beat(self.best.value):
                for _ in hunt.families(lambda: self.best.value):
                    self._tell()
        # a good bound is not yet a good order, so all have their turns; two of few stages take as long as one of many
        waiting = [(hunt.problem.size, place, 0, hunt.rules()) for place, hunt in enumerate(promising)]
        while waiting:
            _, place, tried, rules = heapq.heappop(waiting)
            hunt = promising[place]
            if self._worth(hunt, tried) and next(rules, None) is not None:
                self._tell()
                heapq.heappush(waiting, ((tried + 2) * hunt.problem.size, place, tried + 1, rules))
        while self.budget.limit and self._narrow():
            leaders = sorted(self.open, key=lambda hunt: hunt.value)
            steepness = 0.7 if leaders[0].small else 1.5  # small ones can afford to look at the others too
            hunt = leaders[min(int(generator.expovariate(steepness)), len(leaders) - 1)]
            hunt.step()
            self._tell()
        return self.best

    def _worth(self, hunt: Hunt, tried: int) -> bool:
        """Is another of the first rules worth what it takes here? Where there is no answer yet, always."""
        best = self.best.value
        if self.budget.limit and not hunt.small and hunt.value > BEHIND.get(min(tried, 3), math.inf) * best:
            return False
        if best == math.inf:
            return True
        if hunt.bound >= best * (1 - ROUNDING):
            return False
        if hunt is self.best and tried < min(BEHIND) and not hunt.large:
            return True  # or a family built for the costs could be ahead
        return hunt.rule_takes < self.budget.left if self.budget.limit else not hunt.large

    def _narrow(self) -> bool:
        """Leave out the placements that cannot win any more, and those too large for what is left."""
        value, left = self.best.value, self.budget.left
        self.open = [hunt for hunt in self.hunts if hunt.bound < value * (1 - ROUNDING) and hunt.rule_takes < left]
        return left > 0 and bool(self.open)

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.budget.spent, self.best.value, self.bound)
