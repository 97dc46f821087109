"""Random small pipelines with whole-number costs, which the exact solver ends on: caps, links, uneven everything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.schedule import Costs, Placement

__all__ = ["Instance", "instance"]

UNEVEN = ([0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 2, 1], [1, 0, 2], [0, 1, 1, 0, 2])


class Instance(NamedTuple):
    """What `lower_bound` and `optimum` take."""

    placement: Placement
    microbatches: int
    costs: Costs
    memory: int | Sequence[int] | None


def instance(seed: int, sized: bool = False) -> Instance:
    """One pipeline of 2 to 4 ranks; with `sized`, its microbatches differ."""
    draw = random.Random(seed)
    placement, microbatches = _placed(draw)
    stages, ranks = placement.stages, placement.ranks

    def numbers(low: int, high: int, even: bool) -> int | list[int]:
        return draw.randint(low, high) if even else [draw.randint(low, high) for _ in range(stages)]

    times = [numbers(1, most, draw.random() < 0.5) for most in (5, 5, 4)]
    facts = _links(draw, stages, ranks)
    activation = numbers(1, 3, draw.random() < 0.6)
    sizes = activation if isinstance(activation, list) else [activation] * stages
    held = draw.choice((None, None, [draw.randint(0, size) for size in sizes]))
    if sized:
        facts["sizes"] = [draw.randint(1, 4) for _ in range(microbatches)]
    largest = max(facts.get("sizes", [1]))
    one = [sum(sizes[stage] for stage in placement.stages_of(rank)) * largest for rank in range(ranks)]
    kind = draw.choice(("none", "one", "one", "one", "each"))
    memory: int | list[int] | None = None
    if kind == "one":
        memory = draw.randint(max(one), max(one) * ranks)
    elif kind == "each":
        memory = [draw.randint(need, need * ranks) for need in one]
    return Instance(placement, microbatches, Costs(*times, activation=activation, held=held, **facts), memory)


def _placed(draw: random.Random) -> tuple[Placement, int]:
    kind = draw.choice(("loop", "loop", "loop", "loops", "v", "v", "uneven"))
    if kind == "loop":
        return Placement.loop(draw.choice((2, 3, 4))), draw.randint(3, 7)
    if kind == "uneven":
        return Placement(draw.choice(UNEVEN)), draw.randint(2, 5)
    ranks = draw.choice((2, 2, 3))
    return (Placement.v(ranks) if kind == "v" else Placement.loop(ranks, 2)), draw.randint(2, 4)


def _links(draw: random.Random, stages: int, ranks: int) -> dict[str, Any]:
    kind = draw.choice(("free", "hop", "hop", "links", "bytes"))
    if kind == "hop":
        return {"hop": draw.randint(1, 3)}
    if kind == "links":
        rows = [[draw.randint(0, 6) for _ in range(ranks)] for _ in range(ranks)]
        return {"links": rows, "latency": draw.randint(0, 2)}
    if kind == "bytes":
        return {"bytes": [draw.randint(0, 5) for _ in range(stages)], "bandwidth": 1, "latency": draw.randint(0, 2)}
    return {}
