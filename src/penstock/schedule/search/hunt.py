"""The search on one placement: known orders, then rules, then changes, for as long as there is time.

First what is known: every family's own schedule, so that the answer is never worse than one
of them, and its order with W filled in anew for the true costs. Then orders made by a few
rules that did well on many costs. From then on each step either tries a rule, most often one
that differs from the best so far in one or two points, or a run of small changes to one of the
best orders so far.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from penstock.schedule.bounds import lower_bound
from penstock.schedule.builders import FAMILIES
from penstock.schedule.search.dispatch import Rule, dispatch
from penstock.schedule.search.evaluate import Candidate, complete, price
from penstock.schedule.search.improve import OVERRUNS, improve
from penstock.schedule.search.problem import ROUNDING, Orders, Problem

__all__ = ["Hunt"]

RULES = (
    Rule(weight_time=0.3),
    Rule(turn="forward", input="rested", input_time=0.85, weight_time=0.25),
    Rule(forward="rested", input="old", weight_time=0.5),
    Rule(forward="same", input="deep", patience=0.5, weight_time=0.4, hop_time=1.0),
)
KEPT = 4  # of the best orders, for changes
CHANGES = 4_000_000  # actions priced in one run of changes, over microseconds each
DISPATCH_SECONDS = 8e-6  # of one action, about; to know what there is no time for


class Hunt:
    """The best orders of one placement so far."""

    def __init__(self, problem: Problem, kind: str, generator: random.Random) -> None:
        self.problem, self.kind, self.generator = problem, kind, generator
        self.bound = lower_bound(
            problem.placement, problem.microbatches, problem.costs, problem.memory, span=problem.span
        )
        self.best: list[Candidate] = []
        self.rule: Rule | None = None  # the one that made the best order
        self.rule_score = (float("inf"), 0.0)
        self.priced = 0

    @property
    def value(self) -> float:
        """The objective of the best order so far."""
        return self.best[0].score[0] if self.best else float("inf")

    @property
    def done(self) -> bool:
        """Nothing can be shorter."""
        return self.value <= self.bound * (1 + ROUNDING)

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank has."""
        return self.problem.placement.stages_per_rank

    @property
    def step_seconds(self) -> float:
        """About how long one more rule takes."""
        return 3 * self.problem.size * DISPATCH_SECONDS

    def _offer(self, orders: Orders, overrun: float | None) -> Candidate | None:
        self.priced += 1
        score = price(self.problem, orders, overrun)
        if score is None:
            return None
        found = Candidate(score, orders, overrun)
        self._keep(found)
        return found

    def _keep(self, found: Candidate) -> None:
        if all(found.score != other.score for other in self.best):
            self.best = sorted([*self.best, found], key=lambda candidate: candidate.score)[:KEPT]

    def families(self) -> Iterator[None]:
        """Every builder's schedule for this placement, as it is and with W filled in anew."""
        problem, per_rank = self.problem, self.stages_per_rank
        for family in FAMILIES.values():
            if family.name == "forward-only" or (family.layout == "v" and per_rank != 2):
                continue
            if family.layout == "block" and per_rank > 1:
                continue  # the same as one stage a rank
            if family.placed(problem.ranks, per_rank) != problem.placement:
                continue
            sizes = (problem.ranks, problem.microbatches, per_rank)
            rows = problem.numbers(family.order(*sizes if family.layout == "loop" else sizes[:2]))
            self._offer(rows, None)
            self._refill([[x for x in row if x < 2 * problem.size] for row in rows])
            yield

    def _refill(self, orders: Orders) -> tuple[float, float]:
        scores = []
        for overrun in OVERRUNS:
            found = self._offer(orders, overrun)
            if found is not None:
                scores.append(found.score)
        return min(scores, default=(float("inf"), 0.0))

    def try_rule(self, rule: Rule) -> None:
        """Make an order by a rule, and remember the rule when it did best."""
        score = self._refill(dispatch(self.problem, rule))
        if score <= self.rule_score:
            self.rule, self.rule_score = rule, score

    def rules(self) -> Iterator[None]:
        """The rules to begin with."""
        for rule in RULES:
            self.try_rule(rule)
            yield

    def step(self, deadline: float) -> None:
        """One rule more, or a run of changes."""
        draw = self.generator.random()
        if draw < 0.5 or not self.best:
            self.try_rule(_drawn(self.problem, self.rule if draw < 0.35 else None, self.generator))
            return
        chosen = self.best[min(int(self.generator.expovariate(1.0)), len(self.best) - 1)]
        if chosen.overrun is not None and self.generator.random() < 0.3:
            chosen = Candidate(chosen.score, complete(self.problem, chosen), None)
        tries = max(10, min(1000, CHANGES // (3 * self.problem.size) // 20))
        self.priced += tries
        self._keep(improve(self.problem, chosen, tries, deadline, self.generator))


def _drawn(problem: Problem, like: Rule | None, generator: random.Random) -> Rule:
    """A rule at random; or one that differs from `like` in a few points."""
    per_rank, ranks = problem.placement.stages_per_rank, problem.ranks
    lead = (generator.uniform(0.2, 0.8) * per_rank * ranks, generator.uniform(0.0, 1.2))
    choices: dict[str, Any] = {
        "turn": generator.choice(("alternate", "alternate", "alternate", "forward", "input")),
        "forward": generator.choice(("deep", "deep", "rested", "same", "old")),
        "input": generator.choice(("deep", "shallow", "rested", "same", "old")),
        "patience": generator.choice((0.0, 0.0, 0.5, 1.01)),
        "lead": generator.choice((None, lead)) if per_rank > 1 else None,
        "tightness": generator.choice((0, 0, 0, 1, 2)),
        "input_time": generator.uniform(0.7, 1.4),
        "weight_time": generator.uniform(0.1, 1.2),
        "hop_time": generator.choice((0.0, 0.0, 1.0, generator.uniform(0.0, 3.0))),
        "overrun": generator.choice((0.0, 0.3, 0.6)),
    }
    if like is None:
        return Rule(**choices)
    changed = generator.sample([field.name for field in fields(Rule)], generator.choice((1, 1, 2, 3)))
    return replace(like, **{name: choices[name] for name in changed})
