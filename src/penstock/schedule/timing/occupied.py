"""How long each compute of a run kept its rank from the next one.

A rank is occupied by a compute for longer than the compute itself: it hands over what it made
and goes on to the next action. So the time of an op is from its start to the moment at which
the rank turns to the next one, without what it then waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from penstock.schedule.action import Op
from penstock.schedule.timing.timeline import Span, Timeline


def occupied(timeline: Timeline) -> dict[tuple[Op, int], list[float]]:
    """By op and stage: how long each compute kept its rank from the next one.

    Of computes that only ever ran as parts of pairs, which a handler ran as one, each has an even share of the pair.
    """
    found: dict[tuple[Op, int], list[float]] = defaultdict(list)
    shared: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for span, time in kept_times(timeline):
        parts = span.action.parts()
        for part in parts:
            if part.op.is_compute:
                (found if len(parts) == 1 else shared)[part.op, part.stage].append(time / len(parts))
    for row in timeline.by_rank:
        if row:  # what comes after the last one is the end of the step: it counts only where it is all there is
            last = row[-1]
            for part in last.action.parts():
                if (part.op, part.stage) not in found and (part.op, part.stage) not in shared:
                    found[part.op, part.stage].append(last.length / len(last.action.parts()))
    return {**shared, **found}


def kept_times(timeline: Timeline) -> Iterator[tuple[Span, float]]:
    """Each span but the last of its rank, and how long it kept the rank from the next one."""
    for row in timeline.by_rank:
        for span, following in pairwise(row):
            yield span, max(following.start - following.wait, span.end) - span.start
