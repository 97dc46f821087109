"""Rows of ranks to cut layers for: which rank has the first stage, the second, and so on.

loop    0 1 2 3 0 1 2 3        v        0 1 2 3 3 2 1 0
hosts   0 1 1 0 2 3 3 2        each host in turn, where links between hosts are slower: a microbatch crosses once

The ranks need not come in the order of their numbers. Where links differ, an order is looked for in which neighbours
are near; where speeds differ, slow ranks also come first, and last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from penstock.schedule.placement import Placement
from penstock.tools.search.layers import Model

APART = 1.5  # links this many times slower than others are between hosts


def rows_to_try(
    model: Model, sizes: Iterable[int], kinds: Iterable[str], stages: int | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (what it is, the rank of each stage), each once. `sizes`: stages per rank; `kinds`: loop, v, block.

    With `stages`, rows end there: where they do not fill all ranks alike, the last ranks of the row have one less.
    """
    for kind, row in _rows(model, sizes, kinds):
        if len(set(row[:stages])) == model.ranks:
            yield kind, row[:stages]


def _rows(model: Model, sizes: Iterable[int], kinds: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    seen = set()
    patterns = {"loop": Placement.loop, "v": Placement.v, "block": Placement.block}
    hosts = hosts_of(model.base.links)
    for size in sorted(set(sizes)):
        for kind in kinds:
            for name, order in orders_to_try(model):
                row = tuple(order[rank] for rank in patterns[kind](model.ranks, size).by_stage)
                if row not in seen:
                    seen.add(row)
                    yield f"{kind}{name}", row
            if len(hosts) > 1 and size > 1:
                parts = [[host[rank] for rank in patterns[kind](len(host), size).by_stage] for host in hosts]
                row = tuple(rank for part in parts for rank in part)
                if row not in seen:
                    seen.add(row)
                    yield f"{kind}, host by host", row


def orders_to_try(model: Model) -> Iterator[tuple[str, list[int]]]:
    """Yield (what it is, the ranks in that order)."""
    ranks = list(range(model.ranks))
    yield "", ranks
    if len(set(model.speeds)) > 1:
        yield ", slow ranks last", sorted(ranks, key=lambda rank: -model.speeds[rank])
        yield ", slow ranks first", sorted(ranks, key=lambda rank: model.speeds[rank])
    links = model.base.links
    if links is not None:
        near = _nearest(links)
        if _length(links, near) < _length(links, ranks):
            yield ", near ranks together", near


def hosts_of(links: Sequence[Sequence[float]] | None) -> list[list[int]]:
    """Return ranks with fast links among them; all ranks where links are much the same."""
    if links is None or len(links) < 2:
        return []
    others = [(here, there) for here in range(len(links)) for there in range(len(links)) if here != there]
    times = [max(links[here][there], links[there][here]) for here, there in others]
    low, high = min(times), max(times)
    if high <= APART * low:
        return [list(range(len(links)))]
    limit = (low + high) / 2
    host = list(range(len(links)))
    for (here, there), time in zip(others, times, strict=True):
        if time < limit and host[here] != host[there]:
            old, new = host[there], host[here]
            host = [new if number == old else number for number in host]
    return [[rank for rank, number in enumerate(host) if number == name] for name in dict.fromkeys(host)]


def _length(links: Sequence[Sequence[float]], order: Sequence[int]) -> float:
    """Return what a message takes along all ranks and back, with the slowest link counted once more."""
    steps = [links[a][b] + links[b][a] for a, b in pairwise(order)]
    return sum(steps) + max(steps, default=0.0)


def _nearest(links: Sequence[Sequence[float]]) -> list[int]:
    """Return an order in which neighbours are near: always to the nearest, then turned around piece by piece."""
    order, left = [0], list(range(1, len(links)))
    while left:
        here = order[-1]
        order.append(min(left, key=lambda rank: links[here][rank] + links[rank][here]))
        left.remove(order[-1])
    best, better = _length(links, order), True
    while better:
        better = False
        for first in range(len(order) - 1):
            for end in range(first + 2, len(order) + 1):
                turned = [*order[:first], *order[first:end][::-1], *order[end:]]
                if _length(links, turned) < best * (1 - 1e-9):
                    order, best, better = turned, _length(links, turned), True
    return order
