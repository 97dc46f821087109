"""Neighbourhood search: small changes to one order, kept when it is no worse than some changes ago.

The changes come from where time is lost: an action that its rank idles for goes later, or one behind it goes earlier.
Beside these are moves at random. That "some changes ago" counts is late acceptance: flat stretches are crossed by
drifting, and small hills by remembering less well. Within a stage, microbatches stay in order: they cost the same, so
nothing is lost.
"""

from __future__ import annotations

import random

from penstock.schedule.builders.filling import Candidate, price
from penstock.schedule.builders.problem import Problem
from penstock.tools.search.budget import Budget
from penstock.tools.search.portfolio import IN_TURN

REACH = 12  # how far an action moves at most
MEMORIES = (1, 1, 20, 100)  # how many changes ago counts; 1 never goes uphill


def improve(problem: Problem, candidate: Candidate, tries: int, budget: Budget, generator: random.Random) -> Candidate:
    """Return the best order seen in `tries` changes, made one after the other for as long as the budget lasts."""
    gaps: list[tuple[int, int]] = []
    score = price(problem, candidate.orders, candidate.overrun, gaps)
    if score is None:
        return candidate
    best = Candidate(score, candidate.orders, candidate.overrun)
    orders, overrun = [*candidate.orders], candidate.overrun
    past = [score] * generator.choice(MEMORIES)
    for turn in range(tries):
        if budget.left <= 0:
            break
        budget.orders += 1
        rank, other = 0, overrun
        changed: list[int] | None = orders[0]
        if overrun is not None and generator.random() < 0.02:
            other = (generator.random() * 0.9, generator.choice((0.0, generator.random(), IN_TURN[1])))
        else:
            rank, changed = _changed(problem, orders, gaps, generator)
        if changed is None:
            continue
        kept, orders[rank] = orders[rank], changed
        found = price(problem, orders, other)
        if found is None or found > max(score, past[turn % len(past)]):
            orders[rank] = kept
        else:
            score, overrun = found, other
            price(problem, orders, overrun, gaps)
            if score < best.score:
                best = Candidate(score, [*orders], overrun)
        past[turn % len(past)] = score
    return best


def _changed(
    problem: Problem, orders: list[list[int]], gaps: list[tuple[int, int]], generator: random.Random
) -> tuple[int, list[int] | None]:
    """Return a rank, and its row after one action has moved; None where the move drawn is not allowed."""
    if gaps and generator.random() < 0.6:
        rank, place = gaps[generator.randrange(len(gaps))]
    else:
        rank = generator.randrange(problem.ranks)
        place = generator.randrange(max(1, len(orders[rank]) - 1))
    row, far = orders[rank], place + 1 + int(generator.random() ** 2 * REACH)
    if far >= len(row):
        return rank, None
    goes_later = generator.random() < 0.5
    moved, between = (row[place], row[place + 1 : far + 1]) if goes_later else (row[far], row[place:far])
    must_not_pass = moved + problem.size if goes_later else moved - problem.size
    if must_not_pass in between or any(x // problem.microbatches == moved // problem.microbatches for x in between):
        return rank, None
    return rank, [*row[:place], *([*between, moved] if goes_later else [moved, *between]), *row[far + 1 :]]
