"""What a cap on a rank's memory says of microbatches: how many can be on their way between two of its computes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

from penstock.schedule.timing.costs import Costs

FEW_STAGES = 6  # A rank with up to so many has every choice of them looked at.
ROUNDING = 1e-9


class Limit(NamedTuple):
    """No more than `most` microbatches can be between the start of one stage's F and the end of a backward.

    So the n-th F waits for the (n - most)-th of these backwards, and for `longer` after it.
    """

    most: int
    stage: int
    longer: float
    weight: bool = False  # The backward is W, not I.


def limits_of(own: Sequence[int], costs: Costs, away: Sequence[float], cap: float) -> Iterator[tuple[int, Limit]]:
    """Yield (stage of F, limit) on a rank with these stages. Each follows from what must be held at one moment.

    A microbatch between F and I of a stage also holds what the rank's earlier stages made for it: their I come later.
    Among those on their way to the rank's last stage, one must come to hold all of it while the others wait; and so on
    the way back from there. Where only one at a time can be on that way, the rank does all that the next one needs in
    between: its other F, and the I and W that make room.
    """
    stages = len(away)
    activation, held = costs.per_stage("activation", stages), costs.per_stage("held", stages)
    _, _, backward, weight = costs.by_op(stages)
    sizes = [*accumulate(activation[stage] for stage in own)]
    longer, kept = [], True  # Kept: I gives nothing back, so far.
    for place, stage in enumerate(own):
        kept = kept and held[stage] >= activation[stage]
        ends = [away[other] + backward[other] + weight[other] for other in own[: place + 1]]
        longer.append(min(ends) - away[stage] - backward[stage] if kept else 0.0)
    last = own[-1]
    if kept and 1 < len(own) <= FEW_STAGES and _most(cap, sizes[-1], sizes[0]) == 1:
        forward = costs.by_op(stages)[0]
        room = _least_room(own, activation, backward, weight, 2 * sizes[-1] - cap)
        yield last, Limit(1, last, sum(forward[stage] for stage in own[:-1]) + room)
    for place, stage in enumerate(own):
        yield stage, Limit(_most(cap, sizes[place], sizes[place]), stage, longer[place])
        least = min(activation[stage], held[stage])
        yield stage, Limit(_most(cap, activation[stage], least), stage, 0.0, weight=True)
        together = _most(cap, sizes[-1], sizes[place])
        yield stage, Limit(together, last, longer[-1])
        yield last, Limit(together, stage, longer[place])


def _least_room(
    own: Sequence[int], activation: Sequence[float], backward: Sequence[float], weight: Sequence[float], size: float
) -> float:
    """Return the least time in which a rank, after I of its last stage, gives back so much of that microbatch."""
    best = math.inf
    for count in range(len(own) + 1):
        for chosen in combinations(own, count):
            if sum(activation[stage] for stage in chosen) >= size * (1 - ROUNDING):
                passed = [stage for stage in own[:-1] if chosen and stage >= chosen[0]]
                best = min(best, sum(backward[stage] for stage in passed) + sum(weight[stage] for stage in chosen))
    return best if best < math.inf else 0.0


def _most(cap: float, one: float, each: float) -> int:
    """Return how many there can be, at least one, if one holds `one` and the others `each`."""
    others = (cap - one) / each if each > 0 else math.inf
    return sys.maxsize if others >= sys.maxsize else 1 + max(0, math.floor(others))
