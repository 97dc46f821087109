"""The search on one placement: known orders, then rules, then changes, for as long as the budget lasts.

First what is known: every family's own schedule, so that the answer is never worse than one
of them, and its order with W filled in anew for the true costs. Then orders made by a few
rules that did well on many costs. From then on each step either tries a rule, most often one
that differs from the best so far in one or two points, or a run of small changes to one of the
best orders so far.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.schedule.builders import FAMILIES, Family
from penstock.schedule.builders.problem import LARGE, ROUNDING, Orders, Problem
from penstock.schedule.schedule import Schedule
from penstock.tools.search.bounds.lower_bound import lower_bound
from penstock.tools.search.budget import Budget
from penstock.tools.search.orders.evaluate import NOTHING, Candidate, Overrun, Score, complete, fill, price
from penstock.tools.search.orders.grouped import Grouping, Laps, laps_of
from penstock.tools.search.orders.improve import IN_TURN, OVERRUNS, improve
from penstock.tools.search.orders.laps import change_laps
from penstock.tools.search.orders.recipes import Recipe, drawn, first_recipes, made, overruns_for
from penstock.tools.search.steady_bound import steady_bound

__all__ = ["Hunt"]

KEPT = 4  # of the best orders, for changes
FAR = 1.05  # behind the best so far: other places for W do not make up for that
MARGIN = 1.005  # a large placement must promise to gain this much
SMALL = 500  # computes


class Hunt:
    """The best orders of one placement so far."""

    def __init__(self, problem: Problem, kind: str, generator: random.Random, budget: Budget) -> None:
        self.problem, self.kind, self.generator, self.budget = problem, kind, generator, budget
        self.bound = lower_bound(
            problem.placement,
            problem.microbatches,
            problem.costs,
            problem.memory,
            span=problem.objective != "makespan",
            recompute=problem.recompute,
            quick=True,
        )
        if problem.objective == "steady":
            self.bound = max(self.bound, steady_bound(problem))
        self.best: list[Candidate] = []
        self.recipe: Recipe | None = None  # the one that did best
        self.recipe_score = NOTHING
        self.orders = 0  # how many were priced
        self.grouping: Grouping | None = None  # the one that did best
        self.laps: Laps | None = None  # the best that came of one
        self.laps_score = NOTHING
        self.spent = {"rules": 0.0, "changes": 0.0, "laps": 0.0}
        self.rehearsal = problem.shorter(3 * problem.ranks) if problem.microbatches > 4 * problem.ranks else None

    @property
    def value(self) -> float:
        """The objective of the best order so far."""
        return self.best[0].score[0] if self.best else math.inf

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank has."""
        return self.problem.placement.stages_per_rank

    def is_of(self, schedule: Schedule) -> bool:
        """Has the schedule the same stages on the same ranks, and do the same of them recompute?"""
        return (schedule.placement, schedule.recompute) == (self.problem.placement, self.problem.recompute)

    @property
    def done(self) -> bool:
        """Is nothing better left to find?"""
        return self.value <= self.bound * (1 + ROUNDING)

    @property
    def small(self) -> bool:
        """A run of changes takes no time, so that many can begin anew."""
        return 3 * self.problem.size <= SMALL

    @property
    def large(self) -> bool:
        """One order takes long enough that not all can be tried."""
        return 3 * self.problem.size > LARGE

    @property
    def rule_takes(self) -> float:
        """About what a rule takes of the budget."""
        return self.budget.for_a_rule(3 * self.problem.size)

    # -- what is known

    def families(self, best: Callable[[], float]) -> Iterator[None]:
        """Every builder's schedule for this placement, as it is and with W filled in anew.

        On a large pipeline the family whose first microbatches do best comes first, and those are left out whose first
        microbatches say that they are no match for `best`.
        """
        if not self.large:
            for family in self._known():
                self.begin(self._rows(family, self.problem))
                yield
            return
        estimates = {family: self._estimate(family) for family in self._known()}
        for family, estimate in sorted(estimates.items(), key=lambda entry: entry[1]):
            if estimate < best():
                self._refill(self._draft(family, self.problem))
                yield

    def _known(self) -> Iterator[Family]:
        """The families for this placement, each order once."""
        problem, per_rank = self.problem, self.stages_per_rank
        for family in reversed(FAMILIES.values()):  # the zero-bubble ones, which do best, are the later ones
            if not family.trains or (family.layout == "v" and per_rank != 2):
                continue
            if (family.layout == "block" and per_rank > 1) or (family.as_one_stage and per_rank == 1):
                continue  # the same as another one
            if family.placed(problem.ranks, per_rank) == problem.placement:
                yield family

    def can_beat(self, value: float) -> bool:
        """May there be a better order here, and on a large pipeline one that is better by enough to look for it?"""
        return self.bound * (MARGIN if self.large else 1.0) < value * (1 - ROUNDING)

    def begin(self, orders: Orders) -> None:
        """Try a complete order as it is, and with W filled in anew."""
        self._offer(orders, None)
        self._refill([[x for x in order if x < 2 * self.problem.size] for order in orders], (*OVERRUNS, IN_TURN))

    def _rows(self, family: Family, problem: Problem, **options: bool) -> Orders:
        order = family.rows(problem.ranks, problem.microbatches, self.stages_per_rank, **options)
        return problem.numbers([*order])

    def _draft(self, family: Family, problem: Problem) -> Orders:
        """A family's order of F and I."""
        rows = self._rows(family, problem, weights=False) if family.drafts else self._rows(family, problem)
        return [[x for x in order if x < 2 * problem.size] for order in rows]

    def _estimate(self, family: Family) -> float:
        """What it would take, from what it takes with fewer microbatches; infinite where these do not fit.

        Each microbatch more is more work for the busiest rank, and a family's fill and drain do not shrink. Those that
        promise no cap are tried with one microbatch more than memory holds, since what they hold may grow with all.
        """
        problem, ranks = self.problem, self.problem.ranks
        held = max(problem.least_memory(rank) / cap for rank, cap in enumerate(problem.caps))
        most = int(1 / held) + 1 if held else ranks
        microbatches = max(ranks, most) if family.cap is None and most <= 2 * ranks + 1 else ranks
        if microbatches >= problem.microbatches:
            return 0.0
        short = problem.shorter(microbatches)
        score = price(short, self._draft(family, short), OVERRUNS[0])
        return math.inf if score is None else score[0] + (problem.microbatches - microbatches) * problem.busiest

    def _offer(self, orders: Orders, overrun: Overrun | None) -> Score:
        self._count(1)
        if self.large and overrun is not None:  # to fill it in again at the end takes long
            filled = fill(self.problem, orders, overrun)
            self._keep(filled)
            return filled.score
        score = price(self.problem, orders, overrun)
        if score is None:
            return NOTHING
        self._keep(Candidate(score, orders, overrun))
        return score

    def _count(self, orders: int) -> None:
        self.orders += orders
        self.budget.orders += orders

    def _keep(self, found: Candidate) -> None:
        if found.score < NOTHING and all(found.score != other.score for other in self.best):
            self.best = sorted([*self.best, found], key=lambda candidate: candidate.score)[:KEPT]

    def _refill(self, orders: Orders, overruns: tuple[Overrun, ...] = OVERRUNS) -> Score:
        """Fill in W in several ways; in one only where that takes long, is far behind or finds no room, as with all."""
        best = NOTHING
        for overrun in overruns[:1] if self.large else overruns:
            best = min(best, self._offer(orders, overrun))
            if best == NOTHING or (best[0] > FAR * self.value and not self.small):
                break
        return best

    # -- what is made

    def rules(self) -> Iterator[Recipe]:
        """The recipes to begin with, each when it has been tried."""
        for recipe in first_recipes(self.problem):
            self._try(recipe)
            yield recipe

    def _try(self, recipe: Recipe) -> None:
        """Make an order by a recipe; of many microbatches only when it does well on fewer, which takes less time."""
        short = self.rehearsal
        score = NOTHING
        trial = made(short or self.problem, recipe)
        overruns = overruns_for(recipe)
        if trial is None:
            self._count(1)
        elif short is None:
            score = self._refill(trial, overruns)
        else:
            self._count(len(overruns))
            score = min(price(short, trial, overrun) or NOTHING for overrun in overruns)
            if score <= self.recipe_score and (orders := made(self.problem, recipe)) is not None:
                self._refill(orders, overruns)
        if score <= self.recipe_score:
            self.recipe, self.recipe_score = recipe, score
            self.grouping = recipe if isinstance(recipe, Grouping) else self.grouping

    def step(self) -> None:
        """Rules, changes to laps or a run of changes: what has had least of its share of what was spent so far."""
        begin = self.budget.spent
        shares = {"rules": 0.1 if self.small else 0.5, "changes": 0.9 if self.small else 0.5}
        if self.grouping is not None:
            shares["laps"] = 4.0
        what = min(shares, key=lambda name: self.spent[name] / shares[name]) if self.best else "rules"
        if what == "laps":
            self._change_laps()
        elif what == "rules":
            like = self.recipe if self.generator.random() < 0.7 else None
            self._try(drawn(self.problem, like, self.generator))
        else:
            self._change()
        self.spent[what] += self.budget.spent - begin

    def _change_laps(self) -> None:
        """A run of changes to the best laps so far; seldom, to those of the best grouping again."""
        assert self.grouping is not None
        laps = self.laps
        if laps is None or self.generator.random() < 0.1:
            laps = laps_of(self.problem, replace(self.grouping, patience=0.3))
        tries, before = max(10, min(250, 2 * LARGE // self.problem.size)), self.budget.orders
        laps, found = change_laps(self.problem, laps, tries, self.budget, self.generator)
        self.orders += self.budget.orders - before
        if found.score < self.laps_score:
            self.laps, self.laps_score = laps, found.score
        self._keep(found)

    def _change(self) -> None:
        """A run of changes to one of the best orders, with its W filled in or in their places."""
        chosen = self.best[min(int(self.generator.expovariate(1.0)), len(self.best) - 1)]
        if self.small and self.generator.random() < 0.5:
            orders = made(self.problem, drawn(self.problem, None, self.generator))
            if orders is not None:
                chosen = Candidate(NOTHING, orders, self.generator.choice(OVERRUNS))
        if chosen.overrun is not None and self.generator.random() < 0.3:
            chosen = Candidate(chosen.score, complete(self.problem, chosen), None)
        tries = max(10, min(1000, LARGE // self.problem.size))
        before = self.budget.orders
        self._keep(improve(self.problem, chosen, tries, self.budget, self.generator))
        self.orders += self.budget.orders - before
