"""Costs in, timeline out: what a schedule would take if every compute took its stated time.

A rank runs its computes in order, each as soon as the rank is free and what it needs is
there; transfers cost the hop and run beside the computes. Overlapped pairs are priced as their
parts one after the other, which is what runs unless the user registers a handler that
overlaps them. Where a rank must wait is not stated here: the walk asks the one dependency rule.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ScheduleError, UsageError
from penstock.rules import check_count
from penstock.schedule.action import Action, Op
from penstock.schedule.align import stuck_faults
from penstock.schedule.costs import Costs, is_number, memory_by_op
from penstock.schedule.dependencies import Stuck, Table, Value, walk
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.timeline import Span, Timeline, peaks
from penstock.schedule.wires import Wires

__all__ = ["Spread", "simulate", "what_if"]


def simulate(schedule: Schedule, costs: Costs | None = None, *, jitter: float = 0.0, seed: int = 0) -> Timeline:
    """The predicted timeline of a schedule or program.

    With `jitter`, each compute's time is drawn around its cost with that relative spread.
    """
    expect_schedule(schedule, "simulate")
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs must be a Costs, such as Costs(forward=2.0, input=2.0, weight=1.0); got {costs!r}")
    costs = costs or Costs()
    _check(schedule, costs, jitter)
    rows = _opened(schedule)
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    times = costs.recomputed(schedule.stages, schedule.recompute).by_op(schedule.stages)
    wires = Wires(schedule, table, costs)
    alone, joined, busy_until = wires.alone, wires.joined, wires.busy_until
    noise = random.Random(seed)
    needed, made = table.needed, table.made
    at = [0.0] * table.size
    free = [0.0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in rows]
    stuck: list[Stuck] = []
    new = tuple.__new__
    for rank, _, action in walk(rows, table, stuck):
        stage, op, microbatch, _, _ = action
        idle_from = start = free[rank]
        for base in needed[op][stage]:
            ready = at[base + microbatch]
            if ready > start:
                start = ready
        length = times[op][stage]
        if jitter:
            length *= max(0.0, noise.gauss(1.0, jitter))
        end = start + length
        free[rank] = end
        spans[rank].append(new(Span, (rank, action, start, end, start - idle_from)))
        for base in made[op][stage]:
            at[base + microbatch] = end
        for base, link, occupied, delay in alone[op][stage]:
            if occupied:
                begin = max(end, busy_until[link])
                busy_until[link] = begin + occupied
                at[base + microbatch] = begin + occupied + delay
            else:
                at[base + microbatch] = end + delay
        if joined and (op, stage) in joined:
            wires.join(op, stage, microbatch, end, at)
    if stuck:
        raise ScheduleError(stuck_faults(rows, stuck))
    memory = _peak_memory(rows, schedule, costs)
    _check_sums(schedule.ranks * max(free), max(memory))
    return Timeline(
        schedule,
        tuple(span for row in spans for span in row),
        peak_activations=peaks(rows, schedule.forward_only),
        peak_memory=memory,
        arrival=_Arrivals(table, at),
    )


def _check_sums(*sums: float) -> None:
    if not all(map(math.isfinite, sums)):
        raise UsageError("the costs are too large to be added up; give them in a larger unit")


def _check(schedule: Schedule, costs: Costs, jitter: float) -> None:
    shape = list(schedule.shape_faults())
    if shape:
        raise ScheduleError(shape)
    costs.check_edges(schedule.topology)
    if not is_number(jitter) or not 0 <= jitter < math.inf:
        raise UsageError(f"jitter is a relative spread of 0 or more, such as 0.1; got {jitter!r}")


class _Arrivals:
    """When a value of some stage was there for a span to read."""

    def __init__(self, table: Table, at: list[float]) -> None:
        self.table, self.at = table, at

    def __call__(self, value: Value, stage: int, span: Span) -> float:
        position: int = self.table.base(value, stage, span.rank, span.action.stage) + span.action.microbatch
        return self.at[position]


def _opened(schedule: Schedule) -> Sequence[Sequence[Action | None]]:
    """The rows with overlapped pairs as their two parts."""
    if not any(action is not None and action.pair is not None for row in schedule.rows for action in row):
        return schedule.rows
    return [[part for action in row if action is not None for part in action.parts()] for row in schedule.rows]


def _peak_memory(rows: Sequence[Sequence[Action | None]], schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    needs = memory_by_op(costs, schedule.stages, schedule.recompute)
    found = []
    for row in rows:
        now = most = 0.0
        for action in row:
            if action is not None and action[1] <= Op.W:
                room, change = needs[action[1]][action[0]]
                most = max(most, now + room)
                now = 0.0 if schedule.forward_only else now + change
        found.append(most)
    return tuple(found)


@dataclass(frozen=True)
class Spread:
    """Makespans of many draws, and what they say."""

    makespans: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean makespan."""
        return statistics.fmean(self.makespans)

    @property
    def deviation(self) -> float:
        """The standard deviation of the makespan (0 for a single draw)."""
        return statistics.stdev(self.makespans) if len(self.makespans) > 1 else 0.0

    @property
    def low(self) -> float:
        """The shortest makespan drawn."""
        return min(self.makespans)

    @property
    def high(self) -> float:
        """The longest makespan drawn."""
        return max(self.makespans)


def what_if(
    schedule: Schedule, costs: Costs | None = None, *, jitter: float, draws: int = 100, seed: int = 0
) -> Spread:
    """How the makespan spreads when each compute's time is drawn around its cost; seeded."""
    check_count("draws", draws)
    return Spread(tuple(_draws(schedule, costs, jitter, draws, seed)))


def _draws(schedule: Schedule, costs: Costs | None, jitter: float, draws: int, seed: int) -> Iterator[float]:
    for draw in range(draws):
        yield simulate(schedule, costs, jitter=jitter, seed=seed * 1_000_003 + draw).makespan
