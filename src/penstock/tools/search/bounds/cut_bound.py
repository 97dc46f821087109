"""How short any schedule of some layers can be, whatever the cut and the placement.

work    All ranks together have all the work to do, and cannot start at once: the rank that is k-th to start has
        at least k layers' forwards and k hops to wait for.
pieces  A layer is on one rank. Of layers that take at least t, a rank of speed s can have no more than T s / t
        if it is to do them in T. A T that is too short for all layers to have a place is too short.
way     One microbatch goes through all layers and back, on the fastest rank at best.
"""

from __future__ import annotations

import math

from penstock.tools.search.layers import Model

ROUNDING = 1e-9


def cut_bound(model: Model, microbatches: int, vocabulary: bool) -> float:
    """Return a time that no schedule of these layers can beat. With `vocabulary`, the last layer may be split."""
    scale = model.base.scale(microbatches)
    amount, smallest, largest = sum(scale), min(scale), max(scale)
    whole = model.layers[:-1] if vocabulary else model.layers
    first = min(layer.forward for layer in whole) / max(model.speeds)
    step = smallest * first + _least_hop(model, smallest)
    idle = sum(place * step * speed for place, speed in enumerate(sorted(model.speeds, reverse=True)))
    work = (amount * sum(layer.time for layer in model.layers) + idle) / sum(model.speeds)
    way = largest * sum(layer.forward + (layer.input or 0.0) for layer in whole) / max(model.speeds)
    return max(work, way, amount * _least_load(model, [layer.time for layer in whole]))


def _least_hop(model: Model, scale: float) -> float:
    base = model.base
    if base.links is None:
        return base.hop or base.latency
    times = [time for here, row in enumerate(base.links) for there, time in enumerate(row) if here != there]
    known = not any(layer.bytes for layer in model.layers)
    return base.latency + (min(times, default=0.0) * scale if known else 0.0)


def _least_load(model: Model, times: list[float]) -> float:
    """Return the load that some rank has on every cut: with less, the layers would not have a place."""
    least = sum(times) / sum(model.speeds)
    ordered = sorted(times, reverse=True)
    for number, time in enumerate(ordered, 1):
        if time and ordered[number : number + 1] != [time]:  # All so far take at least `time` each.
            loads = sorted(count * time / speed for speed in set(model.speeds) for count in range(1, number + 1))
            least = max(least, next(load for load in loads if _places(model, load / time) >= number))
    return least


def _places(model: Model, units: float) -> int:
    """Return how many layers that take at least 1 have a place, if a rank of speed 1 has `units` of time."""
    return sum(math.floor(units * speed + ROUNDING) for speed in model.speeds)
