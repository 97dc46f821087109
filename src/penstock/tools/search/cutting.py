"""Where to cut layers for ranks that differ: which layers each stage of a given row of ranks gets.

What a cut is judged by is a bound on the schedule that can be made of it: a rank starts when the first microbatch
has come to it, and from then on has its work to do. So ranks that start late get less of it. The cut with the
smallest such bound over all ranks is looked for, and of equals the one whose second largest is smaller, and so on.
Before all that comes memory: a cut with which a rank cannot hold its layers and one microbatch is no cut.

Beginning with a cut in proportion to the ranks' speeds, one layer at a time moves from a stage of the rank that is
last to any other stage; all boundaries between the two move along. A stage may end up with no layer and is then left
out: that is how ranks come to have unequal numbers of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.tools.search.layers import Model, Shape

ROUNDING = 1e-9
SWEEPS = 200


def cut_layers(
    model: Model,
    row: Sequence[int],
    microbatches: float,
    kind: str,
    split: bool = False,
    even: bool = True,
    full: bool = False,
) -> Shape | None:
    """Return the best cut found for stages on the ranks of `row`; None where a rank gets no layer.

    A stage to which no layer falls is left out or, with `full`, gets one from its neighbours.

    `microbatches` is how many there are, in sizes of one. With `split`, the output layer is shared by all ranks. `even`
    looks at the ranks' work alone, and keeps the stages of a rank as even as they were at first.
    """
    judge = _Judge(model, row, microbatches, split, even)
    bounds = judge.first()
    if not judge.serves_all(bounds):  # a layer that outweighs the others: the ranks next to it have none
        bounds = _filled(bounds, [rank not in row[:stage] for stage, rank in enumerate(row)])
    best = judge.price(bounds)
    for _ in range(SWEEPS):
        better = next(((found, moved) for moved in judge.moves(bounds) if (found := judge.price(moved)) < best), None)
        if better is None:
            break
        best, bounds = better
    return judge.shape(_filled(bounds, [full] * len(row)), kind)


def split_output(model: Model, loads: Sequence[float]) -> tuple[float, ...]:
    """Return how much of the output layer each rank takes, so that the largest load is as small as it can be."""
    work = model.layers[-1].time
    order = sorted(range(model.ranks), key=lambda rank: loads[rank])
    level, room = 0.0, 0.0
    for place, rank in enumerate(order):
        speed = sum(model.speeds[other] for other in order[: place + 1])
        room = sum((loads[rank] - loads[other]) * model.speeds[other] for other in order[:place])
        following = loads[order[place + 1]] if place + 1 < len(order) else float("inf")
        level = loads[rank] + max(0.0, work - room) / speed
        if level <= following:
            break
    if not work:
        return tuple(1 / model.ranks for _ in loads)
    shares = [max(0.0, (level - load) * speed) / work for load, speed in zip(loads, model.speeds, strict=True)]
    return tuple(share / sum(shares) for share in shares)


def neighbours(shape: Shape) -> list[Shape]:
    """Return the cuts that differ by one layer: from any stage to any other, and what is between moves along."""
    found = []
    for source, count in enumerate(shape.counts):
        for target in range(len(shape.counts)):
            if source != target and count > 1:
                moved = list(shape.counts)
                moved[source] -= 1
                moved[target] += 1
                other = replace(shape, counts=tuple(moved))
                shares = split_output(shape.model, other.loads()) if shape.shares else ()
                found.append(replace(other, shares=shares))
    return found


class _Judge:
    """What a cut of one row of ranks is worth."""

    def __init__(self, model: Model, row: Sequence[int], microbatches: float, split: bool, even: bool) -> None:
        self.model, self.row, self.microbatches, self.split, self.even = model, tuple(row), microbatches, split, even
        layers = model.layers[:-1] if split else model.layers
        self.layers = len(layers)
        even_times = not any(layer.time for layer in layers)  # any cut does as well, but every rank gets a layer
        self.times = list(accumulate((layer.time or even_times for layer in layers), initial=0.0))
        self.sizes = list(accumulate(map(model.held_by, layers), initial=0.0))
        self.forwards = list(accumulate((layer.forward for layer in layers), initial=0.0))
        self.hops = [self._hop(here, there) for here, there in zip(row, [*row[1:], row[-1]], strict=True)]

    def _hop(self, here: int, there: int) -> float:
        base = self.model.base
        if here == there:
            return 0.0
        if base.links is not None:
            size = max((layer.bytes for layer in self.model.layers), default=0.0)
            return base.latency + base.links[here][there] * (size or 1.0)
        return base.hop or base.latency

    def first(self) -> list[int]:
        """Return boundaries in proportion to speeds: where the work so far is what it should be."""
        counts = [self.row.count(rank) for rank in range(self.model.ranks)]
        quotas = list(accumulate(self.model.speeds[rank] / counts[rank] for rank in self.row))
        whole, bounds, layer = self.times[-1], [0], 0
        for quota in quotas[:-1]:
            goal = whole * quota / quotas[-1]
            while layer < self.layers and (self.times[layer] + self.times[layer + 1]) / 2 < goal:
                layer += 1
            bounds.append(layer)
        return [*bounds, self.layers]

    def loads(self, bounds: Sequence[int]) -> list[float]:
        """Return, by rank, the time of one microbatch."""
        loads = [0.0] * self.model.ranks
        for stage, rank in enumerate(self.row):
            loads[rank] += self.times[bounds[stage + 1]] - self.times[bounds[stage]]
        return [load / speed for load, speed in zip(loads, self.model.speeds, strict=True)]

    def serves_all(self, bounds: Sequence[int]) -> bool:
        ends = pairwise(bounds)
        return len({rank for rank, (first, end) in zip(self.row, ends, strict=True) if first < end}) == self.model.ranks

    def lacks(self, bounds: Sequence[int]) -> list[float]:
        """Return, by rank, the memory that it lacks for its layers and one microbatch."""
        held = [0.0] * self.model.ranks
        for stage, rank in enumerate(self.row):
            held[rank] += self.sizes[bounds[stage + 1]] - self.sizes[bounds[stage]]
        return [max(0.0, size - cap * (1 + ROUNDING)) for size, cap in zip(held, self.model.memory, strict=False)]

    def ends(self, bounds: Sequence[int]) -> list[float]:
        """Return, by rank, when it could be done: the first microbatch comes to it, and then all of its work."""
        model, loads = self.model, self.loads(bounds)
        if not self.serves_all(bounds):
            return [float("inf")] * model.ranks
        if self.split:
            work = model.layers[-1].time
            shares = split_output(model, loads)
            loads = [load + share * work / s for load, share, s in zip(loads, shares, model.speeds, strict=True)]
        if self.even:
            return [self.microbatches * load for load in loads]
        starts: dict[int, float] = {}
        now, forwards = 0.0, self.forwards
        for stage, rank in enumerate(self.row):
            if bounds[stage + 1] > bounds[stage]:
                starts.setdefault(rank, now)
                now += (forwards[bounds[stage + 1]] - forwards[bounds[stage]]) / model.speeds[rank] + self.hops[stage]
        return [starts[rank] + self.microbatches * load for rank, load in enumerate(loads)]

    def price(self, bounds: Sequence[int]) -> list[float]:
        """Return the memory that is lacking, then the ends of the ranks, the last one first."""
        return [sum(self.lacks(bounds)), *sorted(self.ends(bounds), reverse=True)]

    def moves(self, bounds: list[int]) -> list[list[int]]:
        """Return cuts with one layer less on the rank that is last, or before it, for each stage that could have it.

        Where memory is lacking, the rank that lacks most is the one to have less.
        """
        lacks = self.lacks(bounds)
        ends = lacks if any(lacks) else self.ends(bounds)
        last = max(range(self.model.ranks), key=ends.__getitem__)
        reached = -1 if self.even or any(lacks) else self.row.index(last)
        return [
            _shifted(bounds, source, target)
            for source, rank in enumerate(self.row)
            if bounds[source + 1] > bounds[source] and (source < reached or rank == last)
            for target in range(len(self.row))
            if target != source and not (self.even and self.row[target] == last)
        ]

    def shape(self, bounds: Sequence[int], kind: str) -> Shape | None:
        """Return the cut as a value, without its empty stages."""
        counts = [end - first for first, end in pairwise(bounds)]
        stages = [(rank, count) for rank, count in zip(self.row, counts, strict=True) if count]
        by_stage = tuple(rank for rank, _ in stages)
        shares = split_output(self.model, self.loads(bounds)) if self.split else ()
        if len(set(by_stage)) < self.model.ranks:
            return None
        return Shape(self.model, by_stage, tuple(count for _, count in stages), kind, shares)


def _filled(bounds: Sequence[int], needed: Sequence[bool]) -> list[int]:
    """Return bounds near to these with a layer for every stage that needs one, if there are enough layers."""
    if bounds[-1] < sum(needed):
        return list(bounds)
    filled = [0]
    for bound, need in zip(bounds[1:], needed, strict=True):
        filled.append(max(bound, filled[-1] + need))
    latest = [bounds[-1] - sum(needed[stage:]) for stage in range(len(bounds))]
    return [*map(min, filled, latest)]


def _shifted(bounds: list[int], source: int, target: int) -> list[int]:
    moved = list(bounds)
    step = -1 if source < target else 1
    for boundary in range(min(source, target) + 1, max(source, target) + 1):
        moved[boundary] += step
    return moved
