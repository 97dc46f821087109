"""What a search found: the schedule, how good it is, and what was tried beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.builders.problem import ROUNDING
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.simulate import simulate
from penstock.schedule.timing.steady import SteadyState, steady_state
from penstock.schedule.timing.timeline import Timeline
from penstock.tools.search.request import PLACEMENTS


@dataclass(frozen=True)
class Tried:
    """What came out for one number of stages per rank and one placement."""

    stages_per_rank: int
    placement: str
    value: float  # the objective of the best order; infinite where none fits
    lower_bound: float
    orders: int  # how many were priced
    recompute: tuple[int, ...] = ()  # the stages that run their forward again

    @property
    def key(self) -> tuple[int, str, tuple[int, ...]]:
        """What it is of."""
        return self.stages_per_rank, self.placement, self.recompute


@dataclass(frozen=True)
class Found:
    """The best schedule that a search found, and how good it is.

    Attributes:
        schedule: The schedule.
        costs: The costs of one stage, as `simulate` takes them.
        objective: What was minimised: `"makespan"`, `"span"` or `"steady"`.
        value: The value of the objective.
        lower_bound: A value that no allowed schedule can beat.
        tried: What was tried: each number of stages per rank, placement and choice of recomputing stages.
        seconds: How long the search took.
    """

    schedule: Schedule
    costs: Costs
    objective: str
    value: float
    lower_bound: float
    tried: tuple[Tried, ...]
    seconds: float

    @property
    def gap(self) -> float:
        """How far the value is above the lower bound, as a share of it; 0 is proved best."""
        return max(0.0, self.value / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def proved(self) -> bool:
        """Whether nothing can be better."""
        return self.value <= self.lower_bound * (1 + ROUNDING)

    @property
    def chosen(self) -> Tried:
        """The entry of `tried` that the schedule comes from."""
        placement = self.schedule.placement
        size, again = placement.stages_per_rank, tuple(sorted(self.schedule.recompute))
        return next(
            entry
            for entry in self.tried
            if (entry.stages_per_rank, entry.recompute) == (size, again)
            and PLACEMENTS[entry.placement](placement.ranks, size) == placement
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule priced with its costs."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def steady(self) -> SteadyState:
        """What each of many steps costs if ranks do not wait for each other between them."""
        return steady_state(self.schedule, self.costs)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return self.timeline.makespan

    def __repr__(self) -> str:
        return f"<Found {self.schedule!r} {self.objective} {self.value:g}, {self.gap:.1%} above the bound>"
