"""What a search is asked for, as one checked value: the arguments of `search` are written down here, and only here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import wraps
from typing import ParamSpec, TypeVar, get_args

from penstock.errors import UsageError
from penstock.rules import check_count, check_seed
from penstock.schedule.builders.problem import LARGE, SHARED, Objective
from penstock.schedule.columns import check_size
from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs, given_costs
from penstock.tools.search.bounds.lower_bound import caps_of
from penstock.tools.search.budget import Budget, budget_of
from penstock.tools.search.layers import Hosts, Layer, layers_of, listed

PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"loop": Placement.loop, "v": Placement.v}
SIZES = (1, 2, 3, 4)  # stages per rank to try
MORE_SIZES = (6, 8)  # If the pipeline is not large: small stages fill sooner, and memory holds more groups.

Progress = Callable[[float, float, float], None]  # spent so far, the best value so far, the lower bound
P = ParamSpec("P")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Request:
    """A pipeline to find a schedule for: its costs and memory, and what may be tried.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        costs: Costs of a whole rank: with v stages per rank, each takes 1/v. If given per stage, only that number of
            stages is tried.
        memory: The cap on a rank's peak memory, one number or one per rank, in the unit of `costs.activation`:
            microbatches of a whole rank where that is 1. What `F` takes is held until `I`, `costs.held` until `W`.
        stages_per_rank: The numbers of stages per rank to try. By default 1 to 4, and without `layers` also 6 and 8 on
            a loop if such a pipeline has at most 100,000 computes.
        placements: The placements to try: `"loop"`, `"v"`.
        seconds: About how long to search. By default, 5.
        effort: How many orders to price, instead of `seconds`: the same answer on every machine.
        objective: `"makespan"`; `"steady"`, the time per step where steps overlap, as `steady_state` has it; or
            `"span"`, the longest time from a rank's own start to its own end.
        recompute: Whether to also try recomputing the forwards of some or all stages. They then keep only `costs.kept`
            until their backward; the schedule's `recompute` names them.
        layers: Cut the model as well: its layers, instead of costs per rank. `search_report` then has the cut as
            `counts`. A number is a layer whose `F`, `I` and `W` take that long each; `costs` may have a hop or sizes.
        speeds: How fast each rank is: 0.5 takes twice as long.
        links: The time of a message from each rank to each other one, or `Hosts`; here or in `costs`.
        skips: Pairs (from layer, to layer) where a value skips the layers between them.
        vocabulary: Whether the last layer is an output layer whose product may be split over all ranks.
        seed: Where the random numbers start.
        progress: A function that is called with (seconds so far, or orders if `effort` is given; best value so far;
            lower bound).
    """

    ranks: int
    microbatches: int
    costs: Costs | None = None
    memory: float | Sequence[float] | None = None
    stages_per_rank: int | Iterable[int] | None = None
    placements: str | Iterable[str] = ("loop", "v")
    _: KW_ONLY
    seconds: float | None = None
    effort: int | None = None
    objective: Objective = "makespan"
    recompute: bool = False
    layers: Iterable[Layer | float] | None = None
    speeds: Sequence[float] | None = None
    links: Sequence[Sequence[float]] | Hosts | None = None
    skips: Iterable[tuple[int, int]] = ()
    vocabulary: bool = False
    seed: int = 0
    progress: Progress | None = None
    # what follows from these
    priced: Costs = field(init=False, repr=False)  # the costs, with their links
    caps: tuple[float, ...] = field(init=False, repr=False)  # the memory of each rank
    sizes: tuple[int, ...] = field(init=False, repr=False)  # stages per rank to try
    kinds: tuple[str, ...] = field(init=False, repr=False)  # placements to try

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("ranks", "microbatches"):
            check_count(name, getattr(self, name))
        self._set("layers", None if self.layers is None else layers_of(self.layers))
        self._set("speeds", None if self.speeds is None else listed("speeds", self.speeds, "one number per rank"))
        self._set("skips", listed("skips", self.skips, "pairs (from layer, to layer)"))
        check_size(self.ranks, self.microbatches, 1)  # This is before there is a list with an entry per rank.
        self._set("priced", self._with_links())
        self._set("caps", tuple(caps_of(self.memory, self.ranks)))
        self._set("memory", None if self.memory is None else self.caps)
        self._set("sizes", self._listed_sizes())
        self._set("stages_per_rank", None if self.stages_per_rank is None else self.sizes)
        kinds = self.placements
        self._set("kinds", (kinds,) if isinstance(kinds, str) or not isinstance(kinds, Iterable) else tuple(kinds))
        self._set("placements", self.kinds)
        self._check_lists()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def budget(self) -> Budget:
        """What the search may spend, from now on."""
        return budget_of(self.seconds, self.effort)

    @property
    def may_recompute(self) -> bool:
        """Are stages that recompute to be tried? Without a cap, they only take time."""
        return self.recompute and min(self.caps) < math.inf

    def _with_links(self) -> Costs:
        costs, links = given_costs(self.costs), self.links
        if links is not None and costs.links is not None:
            raise UsageError(
                f"links are given twice, to search and in costs of {len(costs.links)} ranks; give them in one place"
            )
        if links is not None:
            matrix = links.matrix() if isinstance(links, Hosts) else listed("links", links, "rows of times, or Hosts")
            costs = replace(costs, links=matrix)
        if costs.links is not None and len(costs.links) != self.ranks:
            raise UsageError(
                f"links are of {len(costs.links)} ranks, and there are {self.ranks}; give one row for each"
            )
        if self.layers is not None:
            _check_costs_beside_layers(costs)
        return costs

    def _listed_sizes(self) -> tuple[int, ...]:
        given = self.stages_per_rank
        if given is not None:
            return tuple(given) if isinstance(given, Iterable) else (given,)
        each = 3 * self.ranks * self.microbatches
        return (*SIZES, *(size for size in MORE_SIZES if self.layers is None and each * size <= LARGE))

    def _check_kinds(self) -> None:
        for name in ("recompute", "vocabulary"):
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"{name} is True or False, got {value!r}")
        if self.objective not in get_args(Objective):
            raise UsageError(f"the objective is makespan, span or steady, got {self.objective!r}")
        check_seed(self.seed)
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress is a function of (spent, best value, lower bound); got {self.progress!r}")

    def _check_lists(self) -> None:
        for kind in self.kinds:
            if kind not in PLACEMENTS:
                raise UsageError(f"there is no placement {kind!r} to search; known: {', '.join(PLACEMENTS)}")
        if not self.sizes or not self.kinds:
            raise UsageError("nothing to try: give at least one number of stages_per_rank and one of placements")
        for size in self.sizes:
            check_count("stages_per_rank", size)
            check_size(self.ranks, self.microbatches, size)


Request.__init__.__qualname__ = "search"  # Errors call it that when an argument is missing.


def asked(ask: Callable[P, Request], about: str) -> Callable[[Callable[[Request], Answer]], Callable[P, Answer]]:
    """Let a function of a request be called with the arguments of the request. `about` is the start of its help."""

    def decorate(function: Callable[[Request], Answer]) -> Callable[P, Answer]:
        @wraps(function)
        def taking(*args: P.args, **kwargs: P.kwargs) -> Answer:
            return function(ask(*args, **kwargs))

        taking.__doc__ = f"{about}\n\n    Args:{(Request.__doc__ or '').partition('Args:')[2]}"
        returns = inspect.signature(function).return_annotation
        vars(taking)["__signature__"] = inspect.signature(ask).replace(return_annotation=returns)
        return taking

    return decorate


def memory_of_1f1b(ranks: int, costs: Costs) -> float:
    """Return what the first rank of 1F1B holds: as many microbatches as there are ranks."""
    held = costs.activation
    return ranks * held if isinstance(held, (int, float)) else sum(held)


def _check_costs_beside_layers(costs: Costs) -> None:
    """Refuse times and memory beside the layers' own: one of them would be ignored."""
    usual = Costs()
    told = [name for name in (*SHARED, "bytes", "overlap") if getattr(costs, name) != getattr(usual, name)]
    if told:
        raise UsageError(
            f"with layers=, costs has what is between ranks (hop, latency, bandwidth, links) and sizes; got "
            f"{', '.join(told)} as well, which each Layer has for itself"
        )
