"""Costs in, timeline out: what a schedule would take if every compute took its stated time.

A rank runs its computes in order, each as soon as the rank is free and what it needs is
there; transfers cost the hop and run beside the computes. An overlapped pair takes its parts one after the
other, which is what runs unless the user registers a handler that overlaps them; where `Costs(overlap=)` has its
stages it is one event: it waits for what both parts need, takes its share of their sum, and the forward has its
memory before the backward gives any back. Where a rank must wait is not stated here: that is the one dependency rule's.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from penstock.errors import ScheduleError, UsageError
from penstock.rules import check_count, check_seed, is_float
from penstock.schedule.action import Op
from penstock.schedule.columns import Array, Columns
from penstock.schedule.dependencies import Needs, Table, stuck_at, waits_of
from penstock.schedule.events import Waits, run
from penstock.schedule.lowering.align import stuck_faults
from penstock.schedule.proof.shape import shape_faults
from penstock.schedule.repeated import repeated
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.timing.costs import Costs, given_costs, memory_by_op
from penstock.schedule.timing.timeline import Need, Span, Timeline, peaks
from penstock.schedule.timing.wires import Wires


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    jitter: float = 0.0,
    seed: int = 0,
    steps: int = 1,
    update: float = 0.0,
) -> Timeline:
    """Predict the timeline of a schedule or program.

    Args:
        schedule: The schedule or program.
        costs: Times and memory. By default, `F`, `I` and `W` take 1 each and hops take nothing.
        jitter: Draw the time of each compute around its cost, with this relative spread.
        seed: Where the random numbers start.
        steps: Number of steps that each rank runs back to back, without waiting for the others in between. The
            timeline is then of all of them, with microbatches counted on.
        update: Time of the optimizer's update on each rank, between two steps.
    """
    import numpy as np

    expect_schedule(schedule, "simulate")
    costs = given_costs(costs)
    _check(schedule, costs, jitter, seed, update)
    schedule = repeated(schedule, steps)
    if costs.sizes is not None:
        costs = replace(costs, sizes=tuple(costs.sizes) * steps)
    columns, shares = priced_pairs(schedule.columns, costs)
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    needs = waits_of(table, columns)
    wires = Wires(schedule, table, columns, costs)
    on, delay = wires.carried(needs)
    own = Waits(columns.cell[needs.who], on, delay)
    if update and steps > 1:
        own = Waits(*map(np.concatenate, zip(own, _updates(columns, steps, update), strict=True)))
    waits = Waits(*map(np.concatenate, zip(own, wires.waits, strict=True)))
    lengths = np.concatenate((_lengths(schedule, columns, shares, costs, jitter, seed), wires.lengths))
    outcome = run(np.concatenate((columns.starts, wires.starts)), lengths, waits)
    stuck = [(row, number) for row, number in outcome.stuck if row < columns.ranks]
    if stuck:
        raise ScheduleError(stuck_faults(schedule.rows, stuck_at(columns, table, needs, stuck)))
    with np.errstate(over="ignore", invalid="ignore"):
        times = _Times(schedule, columns, outcome.ends, own)
        together = columns.forward_first() if len(shares) else columns
        memory = peak_memory(schedule, costs, together)
    _check_sums(schedule.ranks * times.makespan, max(memory))
    return Timeline.simulated(
        schedule,
        times,
        peak_activations=peaks(together, schedule.forward_only),
        peak_memory=memory,
        arrival=_Arrivals(table, columns, wires, outcome.ends),
    )


def _updates(columns: Columns, steps: int, update: float) -> Waits:
    """Make the first part of a step wait for the update of its rank's weights, which comes between two steps."""
    import numpy as np

    counts = np.diff(columns.starts) // steps
    ranks = np.flatnonzero(counts)
    step = np.arange(1, steps)
    first = (columns.starts[ranks, None] + counts[ranks, None] * step).ravel()
    return Waits(columns.cell[first], first - 1, np.full(len(first), update))


def priced_pairs(columns: Columns, costs: Costs) -> tuple[Columns, Array]:
    """Return the parts, paired only where the costs say that both run together, and the share of each such pair."""
    import numpy as np

    second = columns.second if costs.overlap is not None else columns.second[:0]
    first_is_forward = columns.op[second - 1] == Op.F
    forward = np.where(first_is_forward, columns.stage[second - 1], columns.stage[second])
    backward = np.where(first_is_forward, columns.stage[second], columns.stage[second - 1])
    shares = list(map(costs.pair_share, forward.tolist(), backward.tolist()))
    known = np.array([share is not None for share in shares], dtype=bool)
    return columns.opened(second[known]), np.array([share for share in shares if share is not None])


def _lengths(schedule: Schedule, columns: Columns, shares: Array, costs: Costs, jitter: float, seed: int) -> Array:
    """Return how long each part takes, by op, stage and microbatch; what is no compute takes nothing."""
    import numpy as np

    times = np.zeros((len(Op), schedule.stages))
    times[: Op.W + 1] = costs.recomputed(schedule.stages, schedule.recompute).by_op(schedule.stages)
    found = times[columns.op, columns.stage] * np.array(costs.scale(schedule.microbatches))[columns.microbatch]
    second = columns.second
    if len(second):  # a pair is one event: its first part takes the time of both
        found[second - 1] = (found[second - 1] + found[second]) * shares
        found[second] = 0.0
    if jitter:
        noise = random.Random(seed)
        found *= [max(0.0, noise.gauss(1.0, jitter)) for _ in range(columns.size)]
    return found


class _Times:
    """When each part starts and ends; the spans are made of it when they are asked for."""

    def __init__(self, schedule: Schedule, columns: Columns, ends: Array, waits: Waits) -> None:
        import numpy as np

        self.schedule, self.columns = schedule, columns
        self.ends = ends[: columns.size]
        self.free = np.concatenate(([0.0], self.ends[:-1]))  # Time at which the rank could start.
        self.free[columns.starts[:-1]] = 0.0
        self.starts = self.free.copy()
        np.maximum.at(self.starts, waits.event, ends[waits.on] + waits.delay)
        computes = columns.op <= Op.W
        self.start = float(self.starts[computes].min(initial=math.inf))
        self.makespan = float(self.ends.max()) - self.start
        taken = (self.ends - self.starts) * computes
        self.busy = tuple(sum(taken[first:last].tolist()) for first, last in pairwise(columns.starts.tolist()))

    def step_ends(self, steps: int) -> list[list[float]]:
        import numpy as np

        found = []
        for first, last in pairwise(self.columns.starts.tolist()):
            ends = self.ends[first:last][self.columns.op[first:last] <= Op.W]
            if len(ends):
                found.append(ends[np.arange(1, steps + 1) * len(ends) // steps - 1].tolist())
        return found

    def spans(self) -> tuple[Span, ...]:
        import numpy as np

        new = tuple.__new__
        found: list[Span] = []
        bounds = self.columns.starts.tolist()
        for rank, (first, last) in enumerate(pairwise(bounds)):
            row = [action for action in self.columns.row(rank) if action is not None]
            cells = np.flatnonzero(self.columns.cell[first:last] == np.arange(first, last))
            starts, ends, free = (times[first:last][cells].tolist() for times in (self.starts, self.ends, self.free))
            found += [
                new(Span, (rank, action, start, end, start - before))
                for action, start, end, before in zip(row, starts, ends, free, strict=True)
                if action.op <= Op.W or action.pair is not None
            ]
        return tuple(found)


def _check_sums(*sums: float) -> None:
    if not all(map(math.isfinite, sums)):
        raise UsageError("the costs are too large to be added up; give them in a larger unit")


def _check(schedule: Schedule, costs: Costs, jitter: float, seed: int, update: float) -> None:
    check_seed(seed)
    shape = list(shape_faults(schedule))
    if shape:
        raise ScheduleError(shape)
    costs.check_edges(schedule.topology)
    if not is_float(jitter) or not 0 <= jitter < math.inf:
        raise UsageError(f"jitter is a relative spread of 0 or more, such as 0.1; got {jitter!r}")
    if not is_float(update) or not 0 <= update < math.inf:
        raise UsageError(f"update is the time of the optimizer on a rank, 0 or more; got {update!r}")


class _Arrivals:
    """When what a compute reads was there on its rank."""

    def __init__(self, table: Table, columns: Columns, wires: Wires, ends: Array) -> None:
        self.table, self.columns, self.wires, self.ends = table, columns, wires, ends

    @cached_property
    def at(self) -> Array:
        """By position in the table; endless where nobody makes it."""
        import numpy as np

        on, delay = self.wires.carried(Needs(np.zeros(0), self.table.makers(self.columns), np.arange(self.table.size)))
        return np.append(self.ends, math.inf)[on] + delay

    def __call__(self, need: Need, rank: int) -> float:
        base = self.table.base(need.value, need.stage, rank, need.reader.stage)
        return float(self.at[base + need.reader.microbatch])


def peak_memory(schedule: Schedule, costs: Costs, columns: Columns | None = None) -> tuple[float, ...]:
    """Return the most memory that each rank holds: the order of its actions says it, whatever they take."""
    none = [0.0] * schedule.stages
    return tuple(alone for alone, _ in peaks_with_gradients(schedule, costs, none, none, columns))


def peaks_with_gradients(
    schedule: Schedule,
    costs: Costs,
    gradients: Sequence[float],
    early: Sequence[float],
    columns: Columns | None = None,
) -> list[tuple[float, float]]:
    """Return the most memory that each rank holds: of activations alone, and together with the gradients that exist.

    The gradients of a stage, `gradients` by stage, are there from the end of its first `B` or `W` on; while that runs,
    they need `early` more than later ones.
    """
    import numpy as np

    columns = schedule.columns.opened() if columns is None else columns
    by_op = np.zeros((len(Op), schedule.stages, 2))
    by_op[: Op.W + 1] = memory_by_op(costs, schedule.stages, schedule.recompute)
    scale = np.array(costs.scale(schedule.microbatches))
    found = []
    for first, last in pairwise(columns.starts.tolist()):
        part = slice(first, last)
        room, change = by_op[columns.op[part], columns.stage[part]].T * scale[columns.microbatch[part]]
        before = np.zeros(last - first) if schedule.forward_only else np.concatenate(([0.0], np.cumsum(change)[:-1]))
        held = before + room
        grown, during = np.zeros((2, last - first))
        ends = np.flatnonzero((columns.op[part] == Op.B) | (columns.op[part] == Op.W))
        stages, firsts = np.unique(columns.stage[part][ends], return_index=True)
        grown[ends[firsts]], during[ends[firsts]] = np.asarray(gradients)[stages], np.asarray(early)[stages]
        there = np.cumsum(grown)
        together = max(float((held + there - grown + during).max()), float(there[-1]))
        found.append((max(0.0, float(held.max())), together))
    return found


@dataclass(frozen=True)
class Spread:
    """The makespans of many draws.

    Attributes:
        makespans: One makespan per draw.
    """

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
    """Show how the makespan spreads when computes do not always take the same time.

    Args:
        schedule: The schedule or program.
        costs: Times and memory. By default, `F`, `I` and `W` take 1 each and hops take nothing.
        jitter: The relative spread of the time of each compute.
        draws: How many timelines to draw.
        seed: Where the random numbers start.
    """
    check_count("draws", draws)
    check_seed(seed)
    return Spread(tuple(_draws(schedule, costs, jitter, draws, seed)))


def _draws(schedule: Schedule, costs: Costs | None, jitter: float, draws: int, seed: int) -> Iterator[float]:
    for draw in range(draws):
        yield simulate(schedule, costs, jitter=jitter, seed=seed * 1_000_003 + draw).makespan
