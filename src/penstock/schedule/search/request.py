"""What a search is asked for, as one checked value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import UsageError
from penstock.rules import check_count
from penstock.schedule.placement import Placement
from penstock.schedule.search.problem import SHARED
from penstock.schedule.search.uneven.layers import Hosts, Layer, layers_of, listed
from penstock.schedule.timing.bounds import caps_of
from penstock.schedule.timing.costs import Costs

__all__ = ["PLACEMENTS", "Objective", "Progress", "Request", "request_of"]

PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"loop": Placement.loop, "v": Placement.v}

Objective = Literal["makespan", "span"]
Progress = Callable[[float, float, float], None]  # spent so far, the best value so far, the lower bound


@dataclass(frozen=True)
class Request:
    """A pipeline to find a schedule for: its costs and memory, and what may be tried."""

    ranks: int
    microbatches: int
    costs: Costs  # of a whole rank, or by stage
    caps: tuple[float, ...]  # the memory of each rank
    sizes: tuple[int, ...] = (1, 2, 3, 4)  # stages per rank to try
    kinds: tuple[str, ...] = ("loop", "v")  # placements to try
    objective: Objective = "makespan"
    recompute: bool = False
    layers: tuple[Layer, ...] | None = None  # to cut; None: the costs are of stages already
    speeds: tuple[float, ...] | None = None
    skips: tuple[tuple[int, int], ...] = ()
    vocabulary: bool = False
    stages: int | None = None  # cut layers into exactly so many stages
    seed: int = 0
    progress: Progress | None = None

    @property
    def span(self) -> bool:
        """Is the longest time of a rank's own to be short, and not the makespan?"""
        return self.objective == "span"

    @property
    def may_recompute(self) -> bool:
        """Are stages that recompute to be tried? Without a cap, they only take time."""
        return self.recompute and min(self.caps) < math.inf

    @property
    def uneven(self) -> bool:
        """Is there more than costs by rank or stage: layers to cut, or microbatches that differ?"""
        uneven = self.layers is not None or self.speeds is not None or self.skips or self.vocabulary
        return bool(uneven) or self.costs.sizes is not None


def request_of(
    ranks: int,
    microbatches: int,
    costs: Costs | None,
    memory: float | Sequence[float] | None,
    stages_per_rank: int | Iterable[int],
    placements: str | Iterable[str],
    *,
    objective: Objective = "makespan",
    recompute: bool = False,
    layers: Iterable[Layer | float] | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[Sequence[float]] | Hosts | None = None,
    skips: Iterable[tuple[int, int]] = (),
    vocabulary: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Request:
    """The arguments of `search` as a request, refused where they cannot work."""
    _check_kinds(costs, recompute, vocabulary, objective, seed, progress)
    sizes = tuple(stages_per_rank) if isinstance(stages_per_rank, Iterable) else (stages_per_rank,)
    kinds = tuple(placements) if isinstance(placements, Iterable) and not isinstance(placements, str) else (placements,)
    _check_counts(ranks, microbatches, sizes, kinds)
    costs = costs or Costs()
    if links is not None:
        matrix = links.matrix() if isinstance(links, Hosts) else listed("links", links, "rows of times, or Hosts")
        costs = replace(costs, links=matrix)
    if costs.links is not None and len(costs.links) != ranks:
        raise UsageError(f"links are of {len(costs.links)} ranks, and there are {ranks}; give one row for each")
    if layers is not None:
        _check_costs_beside_layers(costs)
    return Request(
        ranks,
        microbatches,
        costs,
        tuple(caps_of(memory, ranks)),
        sizes,
        kinds,
        objective,
        recompute,
        None if layers is None else layers_of(layers),
        None if speeds is None else listed("speeds", speeds, "one number per rank"),
        listed("skips", skips, "pairs (from layer, to layer)"),
        vocabulary,
        seed=seed,
        progress=progress,
    )


def _check_kinds(
    costs: object, recompute: object, vocabulary: object, objective: object, seed: object, progress: object
) -> None:
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs must be a Costs, such as Costs(forward=2.0, input=2.0, weight=1.0); got {costs!r}")
    for name, value in (("recompute", recompute), ("vocabulary", vocabulary)):
        if not isinstance(value, bool):
            raise UsageError(f"{name} is True or False, got {value!r}")
    if objective not in ("makespan", "span"):
        raise UsageError(f"the objective is makespan or span, got {objective!r}")
    if type(seed) is not int:
        raise UsageError(f"seed is a whole number, such as 0; got {seed!r}")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is a function of (spent, best value, lower bound); got {progress!r}")


def _check_costs_beside_layers(costs: Costs) -> None:
    """Times and memory are the layers' own; said twice, one of them would be ignored."""
    usual = Costs()
    told = [name for name in (*SHARED, "bytes", "overlap") if getattr(costs, name) != getattr(usual, name)]
    if told:
        raise UsageError(
            f"with layers=, costs has what is between ranks (hop, latency, bandwidth, links) and sizes; got "
            f"{', '.join(told)} as well, which each Layer has for itself"
        )


def _check_counts(ranks: int, microbatches: int, sizes: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    numbers = [("ranks", ranks), ("microbatches", microbatches), *(("stages_per_rank", size) for size in sizes)]
    for name, value in numbers:
        check_count(name, value)
    for kind in kinds:
        if kind not in PLACEMENTS:
            raise UsageError(f"there is no placement {kind!r} to search; known: {', '.join(PLACEMENTS)}")
    if not sizes or not kinds:
        raise UsageError("nothing to try: give at least one number of stages_per_rank and one of placements")
