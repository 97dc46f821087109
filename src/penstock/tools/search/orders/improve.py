"""Small changes to one order, kept when they help.

The changes come from where time is lost: an action that its rank idles for goes later, or one
behind it goes earlier. Beside these are random moves, and the same swap of two neighbours made
all along a rank's row, because the middle of a good schedule is a pattern and one change in
one place breaks it.

A change is kept when the score is no worse than now, or than it was some changes ago (late
acceptance): flat stretches are crossed by drifting, and small hills by remembering less well.
Within a stage, microbatches stay in order: they cost the same, so nothing is lost.
"""

from __future__ import annotations

import random

from penstock.schedule.builders.problem import Problem
from penstock.tools.search.budget import Budget
from penstock.tools.search.orders.evaluate import Candidate, Overrun, price

__all__ = ["IN_TURN", "OVERRUNS", "improve"]

OVERRUNS: tuple[Overrun, ...] = ((0.0, 0.0), (0.3, 0.3), (0.6, 0.6))
IN_TURN: Overrun = (0.0, 100.0)  # in the drain, a W with each I
REACH = 12  # how far an action moves at most
MEMORIES = (1, 1, 20, 100)  # how many changes ago counts; 1 never goes uphill


def improve(problem: Problem, candidate: Candidate, tries: int, budget: Budget, generator: random.Random) -> Candidate:
    """The best order seen in `tries` changes, made one after the other for as long as the budget lasts."""
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
            rank, changed = _change(problem, orders, gaps, generator)
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


def _change(
    problem: Problem, orders: list[list[int]], gaps: list[tuple[int, int]], generator: random.Random
) -> tuple[int, list[int] | None]:
    """A rank, and its row after one change; None where the change drawn is not allowed."""
    draw = generator.random()
    if problem.objective == "steady" and gaps and draw < 0.6:
        return _sooner(problem, orders, _gap_of_first_rank(problem, orders, gaps, generator), generator)
    if draw < 0.5 and gaps:
        rank, place = gaps[generator.randrange(len(gaps))]
    else:
        rank = generator.randrange(problem.ranks)
        place = generator.randrange(max(1, len(orders[rank]) - 1))
    row = orders[rank]
    if draw > 0.75:
        return rank, _swap_along(problem, row, place, generator)
    far = place + 1 + int(generator.random() ** 2 * REACH)
    if far >= len(row):
        return rank, None
    if generator.random() < 0.5:
        return rank, _earlier(problem, row, place, far)
    return rank, _later(problem, row, place, far)


def _gap_of_first_rank(
    problem: Problem, orders: list[list[int]], gaps: list[tuple[int, int]], generator: random.Random
) -> tuple[int, int]:
    """Where the first rank, which begins first and ends last, idles after its first I; any gap where it does not."""
    rank = problem.placement.by_stage[0]
    filled = next(place for place, x in enumerate(orders[rank]) if x >= problem.size)
    return generator.choice([gap for gap in gaps if gap[0] == rank and gap[1] > filled] or gaps)


def _sooner(
    problem: Problem, orders: list[list[int]], gap: tuple[int, int], generator: random.Random
) -> tuple[int, list[int] | None]:
    """Let something that an idle rank waits for, some actions back on that microbatch's way, run earlier there."""
    rank, place = gap
    x, count, size = orders[rank][place], problem.microbatches, problem.size
    for _ in range(1 + int(generator.expovariate(0.3))):
        if x < count:  # the first of its microbatch
            break
        x = x - count if x < size else x - size if x >= 2 * size - count else x + count
    rank = problem.placement.by_stage[x % size // count]
    far = orders[rank].index(x)
    place = far - 1 - int(generator.random() ** 2 * REACH)
    return rank, _earlier(problem, orders[rank], place, far) if place >= 0 else None


def _earlier(problem: Problem, row: list[int], place: int, far: int) -> list[int] | None:
    """Move what stands at `far` to `place`."""
    moved, count = row[far], problem.microbatches
    kind, before = moved // count, moved - problem.size
    between = row[place:far]
    if before in between or any(x // count == kind for x in between):
        return None
    return [*row[:place], moved, *between, *row[far + 1 :]]


def _later(problem: Problem, row: list[int], place: int, far: int) -> list[int] | None:
    """Move what stands at `place` to `far`."""
    moved, count = row[place], problem.microbatches
    kind, after = moved // count, moved + problem.size
    between = row[place + 1 : far + 1]
    if after in between or any(x // count == kind for x in between):
        return None
    return [*row[:place], *between, moved, *row[far + 1 :]]


def _swap_along(problem: Problem, row: list[int], place: int, generator: random.Random) -> list[int] | None:
    """Swap two neighbours, and from there on each pair of the same two kinds, for a while or to the end."""
    if place + 1 >= len(row):
        return None
    count, size = problem.microbatches, problem.size
    first, second = row[place] // count, row[place + 1] // count
    if first == second:
        return None
    changed = [*row]
    end = len(row) if generator.random() < 0.5 else min(len(row), place + 2 + generator.randrange(60))
    while place + 1 < end:
        one, two = changed[place], changed[place + 1]
        if one // count == first and two // count == second and two - one != size:
            changed[place], changed[place + 1] = two, one
            place += 1
        place += 1
    return changed
