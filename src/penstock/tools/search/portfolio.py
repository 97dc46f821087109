"""Which rules a search begins with, and how it draws others: a portfolio for each kind of placement and memory."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

from penstock.schedule.builders.dispatch import Rule
from penstock.schedule.builders.filling import Overrun
from penstock.schedule.builders.problem import Problem
from penstock.schedule.builders.rhythm import Rhythm
from penstock.schedule.placement import Placement
from penstock.tools.search.rules import ByStage, Groups, Wave

OVERRUNS: tuple[Overrun, ...] = ((0.0, 0.0), (0.3, 0.3), (0.6, 0.6))
IN_TURN: Overrun = (0.0, 100.0)  # A W with each I in the drain.

BY_STAGE = (
    ByStage(weight_time=0.5),
    ByStage(turn="forward", input="old", input_time=0.85, weight_time=0.4),
    ByStage(forward="old", input="old", weight_time=0.7),
    ByStage(patience=0.5, weight_time=0.6, hop_time=1.0),
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
TIGHT = 0.55  # With a smaller share of 1F1B's memory, a V's rhythm does not fit.
SHARES = (1.0, 1.0, 1.0, 0.9, 0.8, 0.7)  # An order may hold less than the memory.


def overruns_for(rule: Rule) -> tuple[Overrun, ...]:
    """Return how late W may make other actions, where it is filled into an order of this kind."""
    if isinstance(rule, Wave):
        return (0.8, 0.8), (0.99, 0.99), (0.6, 0.6), (0.6, 0.0)
    if isinstance(rule, Rhythm):
        return (0.9, 0.0), (0.8, 0.0), (0.65, 0.0), (0.3, 0.3), (0.0, 0.0)
    return (*OVERRUNS[::2], IN_TURN) if isinstance(rule, Groups) else OVERRUNS


def first_rules(problem: Problem) -> list[Rule]:
    """Return what to begin with: a few that did well on many costs, for this placement and memory."""
    if problem.ranks == 1 or problem.stages == problem.ranks or not problem.topology.is_chain:
        return list(BY_STAGE)
    if _is_v(problem.placement):
        if problem.objective == "steady":
            return [*_waves(problem), *BY_STAGE]
        if _is_tight(problem):  # ranks wait for memory, or just not
            return [*chain.from_iterable(zip(PACED, RHYTHMS, strict=False)), RHYTHMS[-1], *BY_STAGE]
        return [*_waves(problem), *RHYTHMS, *BY_STAGE] if _holds_waves(problem) else [*RHYTHMS, *BY_STAGE]
    lap = _lap(problem.placement)
    patiences = (0.0, 1.0) if _is_tight(problem) else (1.0, 0.0)  # ranks wait for memory, not for each other
    groups = [Groups(size=size, patience=each) for size in _sizes(problem, lap) for each in patiences if lap > 1]
    return [*groups, *BY_STAGE]


def _waves(problem: Problem) -> list[Wave]:
    """Return waves; where stages differ, those of equal ones come first."""
    return [*(replace(wave, equal=True) for wave in WAVES if problem.even is not problem), *WAVES]


def _is_v(placement: Placement) -> bool:
    """Return whether stages go along all ranks, in whichever order, back again, and so on."""
    row = placement.by_stage[: placement.ranks]
    turns = len(placement.by_stage) // placement.ranks
    return placement.by_stage == tuple(rank for turn in range(turns) for rank in row[:: -1 if turn % 2 else 1])


def _is_tight(problem: Problem) -> bool:
    """Return whether memory is too short for ranks that never wait."""
    return min(problem.memory) < TIGHT * problem.ranks * _most_held(problem)


def _holds_waves(problem: Problem) -> bool:
    """Return whether each rank has as many legs as a wave needs to be short, and memory for a group."""
    return problem.placement.stages_per_rank >= 4 and min(problem.caps) >= problem.ranks * _most_held(problem)


def _most_held(problem: Problem) -> float:
    """Return what a microbatch holds on the rank where it holds most."""
    return max(sum(problem.most[stage] for stage in owned) for owned in problem.owned)


def _lap(placement: Placement) -> int:
    """Return after how many stages a loop is back, on all ranks alike or on those of each host; 0 for others."""
    owned = [placement.stages_of(rank) for rank in range(placement.ranks)]
    steps = {after - before for stages in owned for before, after in pairwise(stages)}
    return steps.pop() if len(steps) == 1 and len({*map(len, owned)}) == 1 else 0


def _sizes(problem: Problem, ranks: int) -> list[int]:
    """Group sizes to try on a loop of so many ranks: what memory holds, what a steady pace needs, and around it."""
    per_rank, stages = problem.placement.stages_per_rank, problem.owned[0]
    held = sum(problem.most[stage] for stage in stages) / per_rank
    cap = min(problem.memory)
    fitting = 2 * ranks if cap == math.inf or not held else int((cap / held - ranks) / (per_rank - 1) + 1e-9)
    whole = ranks if cap == math.inf or not held else int(cap / held / per_rank + 1e-9)
    wanted = [fitting, fitting - 1, ranks // 2, (ranks + 1) // 2, whole, 3 * ranks // 4]
    if _is_tight(problem):
        wanted.insert(0, whole)
    if ranks < problem.ranks:  # host by host: what passes one host waits for no other
        wanted = [ranks // 2, ranks, fitting]
    elif fitting > ranks:  # With groups of fewer, a rank waits for the hops of each lap.
        forward = problem.lengths[0]
        unhurried = math.ceil(ranks * (1 + sum(problem.wires[0][:2]) / forward) - 1e-9) if forward else ranks
        wanted = [(ranks + fitting) // 2, min(fitting, unhurried), fitting, ranks]
    return list(dict.fromkeys(min(max(1, size), 2 * ranks) for size in wanted))


def drawn(problem: Problem, like: Rule | None, generator: random.Random) -> Rule:
    """Draw a rule; or one that differs from `like` in a few points."""
    if like is None:
        kinds: list[type[Rule]] = [ByStage, type(first_rules(problem)[0])]
        kind = generator.choice(kinds)
        return kind(**_values(problem, kind, generator))
    values = _values(problem, type(like), generator)
    changed = generator.sample(list(values), generator.choice((1, 1, 2, 3)))
    return replace(like, **{name: values[name] for name in changed})


def _values(problem: Problem, kind: type[Rule], draw: random.Random) -> dict[str, Any]:
    """Draw a value for each field of a rule."""
    if kind is Groups:
        return {
            "size": draw.randint(max(1, problem.ranks // 5), 3 * problem.ranks // 2),
            "patience": draw.choice((0.0, 0.3, 1.0, 1.0, draw.random())),
            "weight_time": draw.choice((1.0, 0.3, draw.uniform(0.1, 1.2))),
            "turn": draw.choice(("alternate", "alternate", "alternate", "input", "forward")),
            "memory": draw.choice(SHARES),
            "even": draw.random() < 0.3,
            "strict": draw.random() < 0.7,
        }
    if kind is Rhythm:
        return {
            "down": draw.choice((0.0, 0.5, 1.0, draw.random())),
            "slack": draw.choice((0.0, None, draw.uniform(0.0, 1.2))),
            "shape": draw.uniform(0.5, 1.6),
            "patience": draw.choice((0.0, 0.3, 0.6, 1.0)),
            "overrun": draw.choice((0.0, 0.3, 0.6, 0.9)),
            "memory": draw.choice(SHARES),
            "weight_time": draw.choice((1.0, 1.0, draw.uniform(0.3, 1.2))),
            "hop_time": draw.choice((0.0, 1.0)),
            "pace": draw.choice((None, draw.uniform(1.0, 1.25))) if _is_tight(problem) else None,
        }
    if kind is Wave:
        return {
            "size": draw.choice((1.0, 1.0, 1.0, draw.uniform(0.4, 2.0))),
            "interval": draw.choice((0.5, draw.uniform(0.3, 0.6), draw.random())),
            "input": draw.choice((0.0, draw.gauss(0.0, 0.2))),
            "late": draw.choice((0.2, draw.random())),
            "pace": draw.choice((1.0, draw.uniform(0.6, 1.1))),
            "patience": draw.choice((0.0, 0.0, draw.random())),
            "overrun": draw.random(),
            "weight_time": draw.choice((1.0, draw.uniform(0.1, 1.0))),
            "hop_time": draw.choice((0.0, 0.0, 1.0)),
            "equal": problem.even is not problem and draw.random() < 0.7,
        }
    return {
        "turn": draw.choice(("alternate", "alternate", "alternate", "forward", "input")),
        "forward": draw.choice(("deep", "deep", "old", "shallow")),
        "input": draw.choice(("deep", "deep", "old", "shallow")),
        "patience": draw.choice((0.0, 0.0, 0.5, 1.0)),
        "input_time": draw.uniform(0.7, 1.4),
        "weight_time": draw.uniform(0.1, 1.5),
        "hop_time": draw.choice((0.0, 0.0, 1.0, draw.uniform(0.0, 3.0))),
    }
