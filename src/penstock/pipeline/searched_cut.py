"""`schedule="auto"` with `balance="time"`: the cut and the schedule are searched for together.

The pieces' measured times and activations are the layers of the search. It knows which rank has which stage only at
the end, so the cut comes first with what it found, and the schedule that was found with it is taken afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelError
from penstock.model.balance.profile import Weight
from penstock.parallel.group.world import World
from penstock.schedule import Schedule
from penstock.schedule.builders import is_auto
from penstock.tool import tool

if TYPE_CHECKING:
    from penstock.schedule import FoundCut, Layer

EFFORT = 300  # orders: the same answer on every rank


class SearchedCut:
    """What was found for the pieces of one model, once they are known."""

    def __init__(self, count: int, ranks: int | None, speeds: Sequence[float] | None) -> None:
        self.count, self.ranks, self.speeds = count, ranks, speeds
        self.found: FoundCut | None = None
        self._searching = tool("penstock.tools.search.cut_search", 'schedule="auto" with balance="time"')

    def cuts(self, stages: int, weights: Sequence[Weight], allowed: Sequence[int] | None) -> list[int]:
        """The first pieces of stages 1, 2, ...; a cut may be before the `allowed` ones."""
        starts = [0, *(range(1, len(weights)) if allowed is None else allowed)]
        if len(starts) < stages:
            raise ModelError(
                f"the model can be cut into {len(starts)} stages at most, and stages={stages} were asked for"
            )
        ends = [*starts[1:], len(weights)]
        layers = [self._layer(weights[first:end]) for first, end in zip(starts, ends, strict=True)]
        ranks = stages if self.ranks is None else self.ranks
        self.found = self._searching.search_stages(stages, ranks, self.count, layers, self.speeds, EFFORT)
        places, first = [], 0
        for count in self.found.counts[:-1]:
            first += count
            places.append(starts[first])
        return places

    def schedule(self, count: int | None) -> Schedule | None:
        """The schedule that belongs to the cut; None as long as there is none."""
        if self.found is None or count is None:
            return None
        return self.found.with_microbatches(count)

    def _layer(self, pieces: Sequence[Weight]) -> Layer:
        """Pieces that stay together. The three parts of a step are taken to be alike: one time was measured for all."""
        third = sum(piece.milliseconds for piece in pieces) / 3
        layer: Layer = self._searching.Layer(
            third, third, third, activation=float(sum(piece.activation_bytes for piece in pieces))
        )
        return layer


def searched_cut(
    schedule: str | Schedule,
    balance: str | Sequence[int] | Mapping[str, float] | Any,
    count: int | None,
    ranks: int | None,
    world: World,
    speeds: Sequence[float] | None,
) -> SearchedCut | None:
    """Where both the cut and the schedule are left to measured times."""
    named = isinstance(schedule, str) and not schedule.lower().endswith((".csv", ".json"))
    if not named or not is_auto(str(schedule)) or balance != "time" or count is None:
        return None
    return SearchedCut(count, ranks or world.size, speeds)
