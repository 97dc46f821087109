"""Ways to make an order, as values: what a search begins with, draws at random and changes a little.

A `Rule` works on any placement, a `Grouping` is for loops, a `Rhythm` for Vs and a `Wave` for Vs in 1F1B's memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from penstock.schedule.builders.problem import Orders, Problem
from penstock.schedule.builders.rhythm import Rhythm, follow
from penstock.schedule.placement import Placement
from penstock.tools.search.orders.dispatch import Rule, dispatch
from penstock.tools.search.orders.evaluate import Overrun
from penstock.tools.search.orders.grouped import Grouping, grouped
from penstock.tools.search.orders.improve import IN_TURN, OVERRUNS
from penstock.tools.search.orders.wave import Wave, sweep

__all__ = ["Recipe", "drawn", "first_recipes", "made", "overruns_for"]

Recipe = Rule | Grouping | Rhythm | Wave

RULES = (
    Rule(weight_time=0.3),
    Rule(turn="forward", input="rested", input_time=0.85, weight_time=0.25),
    Rule(forward="rested", input="old", weight_time=0.5),
    Rule(forward="same", input="deep", patience=0.5, weight_time=0.4, hop_time=1.0),
)
RHYTHMS = (
    Rhythm(),
    Rhythm(patience=1.0, overrun=0.9, weight_time=1.0, hop_time=1.0),
    Rhythm(patience=0.5, overrun=0.3),
    Rhythm(slack=None),
    Rhythm(slack=None, patience=1.0, overrun=0.0),
)
WAVES = (
    Wave(),
    Wave(input=-0.2, patience=0.25),
    Wave(input=-0.06, pace=0.7, patience=0.0),
    Wave(interval=0.43, input=-0.1, pace=0.8, patience=0.0),
)
PACED = tuple(Rhythm(patience=0.0, weight_time=1.0, hop_time=1.0, pace=pace) for pace in (1.12, 1.075, 1.165, 1.24))
TIGHT = 0.55  # of 1F1B's memory: below it, a V's rhythm does not fit
PATIENCES = (1.0, 0.0)
SHARES = (1.0, 1.0, 1.0, 0.9, 0.8, 0.7)  # of the memory, for orders that hold less than they may


def made(problem: Problem, recipe: Recipe) -> Orders | None:
    """The order of F and I that a recipe makes; None where memory does not let it end."""
    if isinstance(recipe, Rule):
        return dispatch(problem, recipe)
    if isinstance(recipe, Grouping):
        return grouped(problem, recipe)
    return sweep(problem, recipe) if isinstance(recipe, Wave) else follow(problem, recipe)


def overruns_for(recipe: Recipe) -> tuple[Overrun, ...]:
    """How late W may make other actions, where it is filled into an order of this kind."""
    if isinstance(recipe, Wave):
        return (0.8, 0.8), (0.99, 0.99), (0.6, 0.6), (0.6, 0.0)
    if isinstance(recipe, Rhythm):
        return (0.9, 0.0), (0.8, 0.0), (0.65, 0.0), (0.3, 0.3), (0.0, 0.0)
    return (*OVERRUNS[::2], IN_TURN) if isinstance(recipe, Grouping) else OVERRUNS


def first_recipes(problem: Problem) -> list[Recipe]:
    """What to begin with: a few that did well on many costs, for this placement and memory."""
    if problem.ranks == 1 or problem.stages == problem.ranks:
        return list(RULES)
    if _is_v(problem.placement):
        if problem.objective == "steady":
            return [*_waves(problem), *RULES]
        if _is_tight(problem):
            return [*PACED, *RHYTHMS, *RULES]
        return [*_waves(problem), *RHYTHMS, *RULES] if _holds_waves(problem) else [*RHYTHMS, *RULES]
    lap = _lap(problem.placement)
    patiences = PATIENCES[::-1] if _is_tight(problem) else PATIENCES  # ranks wait for memory, not for each other
    return [*(Grouping(size, patience) for size in _sizes(problem, lap) for patience in patiences if lap > 1), *RULES]


def _waves(problem: Problem) -> list[Wave]:
    """Where stages differ, the waves of equal ones come first."""
    return [*(replace(wave, even=True) for wave in WAVES if problem.even is not problem), *WAVES]


def _is_v(placement: Placement) -> bool:
    """Do stages go along all ranks, in whichever order, back again, and so on?"""
    row = placement.by_stage[: placement.ranks]
    turns = len(placement.by_stage) // placement.ranks
    return placement.by_stage == tuple(rank for turn in range(turns) for rank in row[:: -1 if turn % 2 else 1])


def _is_tight(problem: Problem) -> bool:
    """Is memory too short for ranks that never wait?"""
    return min(problem.memory) < TIGHT * problem.ranks * _most_held(problem)


def _holds_waves(problem: Problem) -> bool:
    """Has each rank as many legs as a wave needs to be short, and memory for a group?"""
    return problem.placement.stages_per_rank >= 4 and min(problem.caps) >= problem.ranks * _most_held(problem)


def _most_held(problem: Problem) -> float:
    """What a microbatch holds on the rank where it holds most."""
    return max(sum(problem.most[stage] for stage in problem.placement.stages_of(rank)) for rank in range(problem.ranks))


def _lap(placement: Placement) -> int:
    """After how many stages a loop is back where it was: on all ranks alike, or on those of each host; 0 for others."""
    owned = [placement.stages_of(rank) for rank in range(placement.ranks)]
    steps = {after - before for stages in owned for before, after in pairwise(stages)}
    return steps.pop() if len(steps) == 1 and len({*map(len, owned)}) == 1 else 0


def _sizes(problem: Problem, ranks: int) -> list[int]:
    """Group sizes to try on a loop of so many ranks: what memory holds, what a steady pace needs, and around it."""
    per_rank, stages = problem.placement.stages_per_rank, problem.placement.stages_of(0)
    held = sum(problem.most[stage] for stage in stages) / per_rank
    cap = min(problem.memory)
    fitting = 2 * ranks if cap == math.inf or not held else int((cap / held - ranks) / (per_rank - 1) + 1e-9)
    whole = ranks if cap == math.inf or not held else int(cap / held / per_rank + 1e-9)
    wanted = [fitting, fitting - 1, ranks // 2, (ranks + 1) // 2, whole, 3 * ranks // 4]
    if _is_tight(problem):
        wanted.insert(0, whole)
    if ranks < problem.ranks:  # host by host: what passes one host waits for no other
        wanted = [ranks // 2, ranks, fitting]
    elif fitting > ranks:  # with groups of fewer, a rank waits for the hops of each lap
        wanted = [(ranks + fitting) // 2, min(fitting, _unhurried(problem, ranks)), fitting, ranks]
    return list(dict.fromkeys(min(max(1, size), 2 * ranks) for size in wanted))


def _unhurried(problem: Problem, ranks: int) -> int:
    """So many that the first one is back on a rank, with all its hops, when the last one has passed."""
    forward = problem.time[0]
    return math.ceil(ranks * (1 + sum(problem.wires[0][:2]) / forward) - 1e-9) if forward else ranks


def drawn(problem: Problem, like: Recipe | None, generator: random.Random) -> Recipe:
    """A recipe at random; or one that differs from `like` in a few points."""
    if like is None:
        kinds = list(dict.fromkeys((Rule, type(first_recipes(problem)[0]))))
        kind = generator.choice(kinds)
        return kind(**CHOICES[kind](problem, generator))
    choices = CHOICES[type(like)](problem, generator)
    changed = generator.sample([field.name for field in fields(like)], generator.choice((1, 1, 2, 3)))
    return replace(like, **{name: choices[name] for name in changed})


def _rule(_: Problem, generator: random.Random) -> dict[str, Any]:
    return {
        "turn": generator.choice(("alternate", "alternate", "alternate", "forward", "input")),
        "forward": generator.choice(("deep", "deep", "rested", "same", "old")),
        "input": generator.choice(("deep", "shallow", "rested", "same", "old")),
        "patience": generator.choice((0.0, 0.0, 0.5, 1.01)),
        "input_time": generator.uniform(0.7, 1.4),
        "weight_time": generator.uniform(0.1, 1.2),
        "hop_time": generator.choice((0.0, 0.0, 1.0, generator.uniform(0.0, 3.0))),
    }


def _grouping(problem: Problem, generator: random.Random) -> dict[str, Any]:
    return {
        "size": generator.randint(max(1, problem.ranks // 5), 3 * problem.ranks // 2),
        "patience": generator.choice((0.0, 0.3, 1.0, 1.0, generator.random())),
        "weight_time": generator.choice((1.0, 0.3, generator.uniform(0.1, 1.2))),
        "turn": generator.choice(("alternate", "alternate", "alternate", "input", "forward")),
        "memory": generator.choice(SHARES),
        "even": generator.random() < 0.3,
    }


def _rhythm(problem: Problem, generator: random.Random) -> dict[str, Any]:
    return {
        "down": generator.choice((0.0, 0.5, 1.0, generator.random())),
        "slack": generator.choice((0.0, None, generator.uniform(0.0, 1.2))),
        "shape": generator.uniform(0.5, 1.6),
        "patience": generator.choice((0.0, 0.3, 0.6, 1.0)),
        "overrun": generator.choice((0.0, 0.3, 0.6, 0.9)),
        "memory": generator.choice(SHARES),
        "weight_time": generator.choice((1.0, 1.0, generator.uniform(0.3, 1.2))),
        "hop_time": generator.choice((0.0, 1.0)),
        "pace": generator.choice((None, generator.uniform(1.0, 1.25))) if _is_tight(problem) else None,
    }


def _wave(problem: Problem, generator: random.Random) -> dict[str, Any]:
    return {
        "size": generator.choice((1.0, 1.0, 1.0, generator.uniform(0.4, 2.0))),
        "interval": generator.choice((0.5, generator.uniform(0.3, 0.6), generator.random())),
        "input": generator.choice((0.0, generator.gauss(0.0, 0.2))),
        "late": generator.choice((0.2, generator.random())),
        "pace": generator.choice((1.0, generator.uniform(0.6, 1.1))),
        "patience": generator.choice((0.0, 0.0, generator.random())),
        "overrun": generator.random(),
        "weight_time": generator.choice((1.0, generator.uniform(0.1, 1.0))),
        "hop_time": generator.choice((0.0, 0.0, 1.0)),
        "memory": 1.0,
        "even": problem.even is not problem and generator.random() < 0.7,
    }


CHOICES: dict[type[Recipe], Callable[[Problem, random.Random], dict[str, Any]]] = {
    Rule: _rule,
    Grouping: _grouping,
    Rhythm: _rhythm,
    Wave: _wave,
}
