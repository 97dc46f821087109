"""A schedule made anew for microbatches that differ in size, fast enough to be done for every batch.

Sizes that vary by batch (packed sequences, microbatches by length) make a family's fixed order wait: every rank is
at some time held up by the largest microbatch, and a W that was to fill a gap no longer fits it. Here the
microbatches get a new order, and so do F, I and W, made by a rule on a clock with the true times.

What comes back takes no longer than the given schedule by the simulator's clock, and no rank holds more than the
fullest rank of the given schedule would: where nothing better is found, it is the given one. A schedule with full
backwards keeps its pattern, and only the microbatches in it change places, because splitting a backward may cost
time that no simulator knows of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.errors import UsageError
from penstock.rules import is_float
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.builders.dispatch import dispatch
from penstock.schedule.builders.problem import Problem
from penstock.schedule.lowering.align import align
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.timing.costs import Costs, given_costs
from penstock.schedule.timing.simulate import simulate
from penstock.tools.search.layers import listed
from penstock.tools.search.rules import ByStage

TRUE = ByStage(overrun=0.9, weight_time=1.0, hop_time=1.0)
ALIKE = 0.02  # sizes within this share of each other count as equal
ROUNDING = 1e-9


def sequences(sizes: Sequence[float]) -> list[list[int]]:
    """Return orders worth trying in which microbatches go through a pipeline, the likeliest first.

    Small ones first, so that the last rank gets to work early; the large ones in the middle, where every rank has other
    work to do while they pass; and small ones last, so that nobody waits long for the last to come back. The sizes rise
    with every second microbatch and fall with the others; the smallest comes first, or last.
    """
    count = len(sizes)
    if len(set(sizes)) == 1:
        return [list(range(count))]
    order = sorted(range(count), key=sizes.__getitem__)
    return [order[1::2] + order[0::2][::-1], order[0::2] + order[1::2][::-1]]


def late_peak(sizes: Sequence[float]) -> list[int]:
    """Return an order for one microbatch that is far larger: it comes when two thirds of the others have gone."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    falling = order[:-1:3]
    return [*(number for number in order if number not in falling), *reversed(falling)]


def order_microbatches(
    schedule: Schedule, sizes: Iterable[float], costs: Costs | None = None, memory: float | None = None
) -> Schedule:
    """Return the same stages on the same ranks, in an order made for microbatches of these sizes.

    Args:
        schedule: The schedule whose stages and ranks are kept.
        sizes: The size of each microbatch.
        costs: Costs per stage of a microbatch of size 1. By default, all stages are alike.
        memory: The most that a rank may hold, in the unit of `costs.activation`. By default, what the fullest rank of
            the given schedule would hold of these microbatches. If no order found holds so little, that is an error.
    """
    expect_schedule(schedule, "order_microbatches")
    if schedule.passes:
        raise UsageError("order_microbatches takes a schedule without transfers: pass schedule.compute()")
    if memory is not None and not (is_float(memory) and memory > 0):
        raise UsageError(f"memory must be one number above 0, got {memory!r}; leave it out for that of the schedule")
    priced = replace(given_costs(costs), sizes=listed("sizes", sizes, "numbers, one per microbatch"))
    scale = priced.scale(schedule.microbatches)
    before = simulate(schedule, priced)
    peak = max(before.peak_memory)
    cap = peak if memory is None else memory
    fits = peak <= cap * (1 + ROUNDING)
    alike = max(scale) - min(scale) <= ALIKE * max(scale)
    if fits and (schedule.forward_only or alike):
        return schedule
    limit = before.makespan * (1 - ROUNDING) if fits else float("inf")
    found = None if schedule.forward_only else reordered(schedule, priced, [cap] * schedule.ranks, limit)
    if found is None and not fits:
        raise UsageError(
            f"no order was found in memory {memory:g}: the given one holds {peak:g} of these microbatches; "
            "give more memory, or a schedule that holds less, such as build('v-min', ...)"
        )
    return schedule if found is None else found


def reordered(schedule: Schedule, priced: Costs, caps: Sequence[float], limit: float) -> Schedule | None:
    """Return an order that fits the caps, one per rank, and ends before the limit; None if none was found."""
    scale = priced.scale(schedule.microbatches)
    if (schedule.columns.op == Op.B).any():
        best = None
        for candidate in _renumbered(schedule, sequences(scale)):
            found = simulate(candidate, priced)
            if found.makespan < limit and within(found.peak_memory, caps):
                best, limit = candidate, found.makespan
        return None if best is None else align(best)
    options: dict[str, Any] = {"topology": schedule.topology, "recompute": schedule.recompute}
    problem = Problem(schedule.placement, schedule.microbatches, priced, caps, **options)
    if problem.lack:
        return None
    outcome = None
    for sequence, overrun in product([*sequences(scale), late_peak(scale)], (0.9, 0.6)):
        ended = dispatch(problem, replace(TRUE, overrun=overrun), sequence)
        if ended is not None and ended.end < limit:
            outcome, limit = ended.orders, ended.end
    return None if outcome is None else problem.schedule(outcome, schedule.name)


def within(peaks: Iterable[float], caps: Iterable[float]) -> bool:
    """Return whether no rank's peak is above its cap, but for rounding."""
    return all(peak <= cap * (1 + ROUNDING) for peak, cap in zip(peaks, caps, strict=True))


def _renumbered(schedule: Schedule, orders: Iterable[Sequence[int]]) -> Iterator[Schedule]:
    """Return the same pattern with other microbatches in it."""
    for order in orders:
        yield schedule.replace(
            [None if action is None else _with_microbatch(action, order) for action in row] for row in schedule.rows
        )


def _with_microbatch(action: Action, order: Sequence[int]) -> Action:
    if action.pair is not None:
        first, second = (_with_microbatch(part, order) for part in action.pair)
        return Action.overlap(first, second)
    return trusted(action.stage, action.op, order[action.microbatch])
