"""The steady state: what a step costs when ranks go from one step into the next without waiting for each other.

A single step pays for filling and draining the pipeline: its makespan. Back to back, a rank that has drained fills
again while others still drain, and after a few steps every rank's step ends the same time after the one before it.
That time is the period. It is at least the work of the busiest rank, and zero-bubble schedules come close to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.simulate import simulate

FIRST, LAST = 4, 32  # steps that are simulated, at first and at most


@dataclass(frozen=True)
class SteadyState:
    """A run of many steps without a barrier between them.

    Attributes:
        period: Time from the end of a step to the end of the next one.
        idle: The idle share of all ranks together. The optimizer's update counts as work.
    """

    period: float
    idle: float


def steady_state(schedule: Schedule, costs: Costs | None = None, *, update: float = 0.0) -> SteadyState:
    """Predict what each of many steps costs if ranks do not wait for each other between them.

    Args:
        schedule: The schedule or program.
        costs: Times and memory. By default, `F`, `I` and `W` take 1 each and hops take nothing.
        update: Time of the optimizer's update on each rank, between two steps.
    """
    steps, period = FIRST, None
    while period is None:
        timeline = simulate(schedule, costs, steps=steps, update=update)
        period = _period(timeline.step_ends(steps), last=steps >= LAST)
        steps *= 2
    busy = sum(timeline.busy) * 2 / steps + update * schedule.ranks
    return SteadyState(period, max(0.0, 1 - busy / (schedule.ranks * period)) if period else 0.0)


def _period(ends: list[list[float]], last: bool) -> float | None:
    """Return the time between the ends of steps, once all ranks have the same; if steps differ by turns, the mean."""
    between = [after - before for row in ends for before, after in pairwise(row[-3:])]
    if max(between, default=0.0) - min(between, default=0.0) <= 1e-9 * max(map(max, ends), default=0.0):
        return max(between, default=0.0)
    half = len(ends[0]) // 2
    return max((row[-1] - row[half - 1]) / (len(row) - half) for row in ends) if last else None
