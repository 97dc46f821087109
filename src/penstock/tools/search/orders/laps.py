"""Changes to the laps of a loop, which all its ranks make alike.

In a pipeline, one rank's order is the order of its neighbours, a little earlier or later. A change on one rank alone
makes the others wait, and where it takes a change on each of them to gain something, changes one by one never get
there. So here a lap goes earlier or later on every rank at once, and the pipeline is run anew on the clock. Most of
what there is to gain is where the pipeline fills and drains: the middle is a pattern in which no rank waits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from penstock.schedule.builders.problem import Problem
from penstock.tools.search.budget import Budget
from penstock.tools.search.orders.evaluate import NOTHING, Candidate, Overrun, price
from penstock.tools.search.orders.grouped import Lap, Laps, take_laps
from penstock.tools.search.orders.improve import IN_TURN

__all__ = ["change_laps"]

OVERRUNS: tuple[Overrun, ...] = ((0.0, 0.0), (0.6, 0.0), (0.8, 0.0), IN_TURN)
REACH = (1, 1, 2, 3, 4, 5)  # how far a lap moves
END = 0.35  # of the laps, at the end where most changes are made


def _price(problem: Problem, laps: Laps, overruns: Iterable[Overrun], budget: Budget) -> Candidate:
    """The order that comes of laps, with W filled in as does best."""
    budget.orders += 1
    orders = take_laps(problem, laps)
    if orders is None:
        return Candidate(NOTHING, [], None)
    score, overrun = min((price(problem, orders, overrun) or NOTHING, overrun) for overrun in overruns)
    return Candidate(score, orders, overrun)


def change_laps(
    problem: Problem, laps: Laps, tries: int, budget: Budget, generator: random.Random
) -> tuple[Laps, Candidate]:
    """The best laps seen in `tries` changes, made one after the other for as long as the budget lasts."""
    best = _price(problem, laps, OVERRUNS, budget)
    for _ in range(tries):
        if budget.left <= 0:
            break
        changed = Laps(laps.grouping, [*laps.forwards], [*laps.inputs])
        moved = [_move(changed, generator) for _ in range(generator.choice((1, 1, 1, 2)))]
        if not any(moved):
            continue
        found = _price(problem, changed, {best.overrun or OVERRUNS[0], generator.choice(OVERRUNS)}, budget)
        if found.score <= best.score:
            best, laps = found, changed
    return laps, best


def _move(laps: Laps, generator: random.Random) -> bool:
    """Move a lap or two neighbours, forwards mostly in the fill, backwards in the drain; False where they may not."""
    is_forward = generator.random() < 0.5
    row, count = (laps.forwards, len(laps.forwards)) if is_forward else (laps.inputs, len(laps.inputs))
    place = generator.randrange(count)
    if generator.random() < 0.7:
        place = int(END * place) if is_forward else count - 1 - int(END * place)
    end = place + generator.choice((1, 1, 1, 2))
    by = generator.choice(REACH)
    passed = row[max(0, place - by) : place] if generator.random() < 0.5 else row[end : end + by]
    moved = row[place:end]
    if end > count or not passed or not all(_may_pass(lap, other) for lap in moved for other in passed):
        return False
    if row[end : end + len(passed)] == passed:
        row[place : end + len(passed)] = [*passed, *moved]
    else:
        row[place - len(passed) : end] = [*moved, *passed]
    return True


def _may_pass(lap: Lap, other: Lap) -> bool:
    """Microbatches stay in order within a stage, and a microbatch takes its laps in order."""
    return lap[0] != other[0] and lap[1] != other[1]
