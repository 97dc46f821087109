"""Microbatches that differ: their order, and where W goes."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.schedule import (
    Costs,
    Op,
    Schedule,
    align,
    build,
    lower,
    lower_bound,
    order_microbatches,
    search_report,
    simulate,
    verify,
)


def drawn(seed: int, count: int = 24) -> list[float]:
    generator = random.Random(seed)
    return [generator.lognormvariate(0, 0.6) for _ in range(count)]


def test_a_microbatch_of_size_two_takes_twice_as_long_and_twice_the_memory() -> None:
    schedule = Schedule(["0F0 0F1 0B0 0B1"])
    timeline = simulate(schedule, Costs(sizes=[1, 2]))
    assert [span.end - span.start for span in timeline.spans] == [1, 2, 2, 4]
    assert timeline.peak_memory == (3,)


def test_its_messages_take_twice_as_long_on_a_link() -> None:
    timeline = simulate(build("gpipe", 2, 1), Costs(links=[[0, 3], [5, 0]], sizes=[2]))
    arrivals = [*[span.start for span in timeline.spans if span.rank == 1][:1], timeline.spans[1].start]
    assert arrivals == [2 + 6, 8 + 2 + 4 + 10]


@pytest.mark.parametrize("name", ["zb-v", "zb-h1", "interleaved-zb", "1f1b", "gpipe", "dualpipe-v", "v-half"])
def test_the_order_is_proved_no_longer_and_takes_no_more_memory(name: str) -> None:
    schedule = build(name, 4, 10)
    for seed in range(4):
        costs = Costs(sizes=drawn(seed, 10))
        found = order_microbatches(schedule, drawn(seed, 10))
        verify(lower(found))
        before, after = simulate(schedule, costs), simulate(found, costs)
        assert after.makespan <= before.makespan * (1 + 1e-9)
        assert max(after.peak_memory) <= max(before.peak_memory) * (1 + 1e-9)
        kinds = [{part.op for _, _, part in each.parts()} for each in (schedule, found)]
        assert (Op.B in kinds[0]) == (Op.B in kinds[1])  # a full backward stays one


def test_zb_v_of_lognormal_sizes_idles_half_as_much() -> None:
    schedule = build("zb-v", 8, 24)
    before, after = [], []
    for seed in range(8):
        costs = Costs(sizes=drawn(seed))
        before.append(simulate(schedule, costs).bubble)
        after.append(simulate(order_microbatches(schedule, drawn(seed)), costs).bubble)
    assert statistics.median(after) <= 0.10
    assert statistics.mean(after) < 0.5 * statistics.mean(before)


def test_sizes_that_are_alike_change_nothing() -> None:
    schedule = build("zb-v", 2, 4)
    assert order_microbatches(schedule, [5, 5, 5, 5]) is schedule
    assert order_microbatches(schedule, [5, 5.01, 5, 5]) is schedule


def test_what_has_no_sizes_or_transfers_already_is_refused() -> None:
    schedule = build("zb-v", 2, 4)
    with pytest.raises(UsageError, match="3 numbers for 4 microbatches"):
        order_microbatches(schedule, [1, 2, 3])
    with pytest.raises(UsageError, match="without transfers"):
        order_microbatches(lower(schedule), [1, 2, 3, 4])
    with pytest.raises(UsageError, match="0 or more"):
        Costs(sizes=[1, -2])
    with pytest.raises(UsageError, match="sizes is a list of numbers"):
        order_microbatches(schedule, 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a Costs"):
        order_microbatches(schedule, [1, 2, 3, 4], 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [float("nan"), -1, 0, "4", [4, 4]])
def test_memory_that_is_no_number_above_0_is_refused(memory: Any) -> None:
    with pytest.raises(UsageError, match="one number above 0"):
        order_microbatches(build("zb-v", 2, 4), [1, 2, 3, 4], memory=memory)


@pytest.mark.parametrize("family", ["zb-v", "1f1b"])
@pytest.mark.parametrize("sizes", [[1, 2, 3, 4], [2, 2, 2, 2]])
def test_a_cap_that_nothing_fits_is_an_error_and_not_the_given_schedule(family: str, sizes: list[float]) -> None:
    """Whoever names a cap relies on it: a schedule that holds more must not come back as if it fitted."""
    with pytest.raises(UsageError, match=r"no order was found in memory 0\.1"):
        order_microbatches(build(family, 2, 4), sizes, memory=0.1)


def test_a_cap_below_the_given_schedules_peak_is_kept() -> None:
    schedule, costs = build("zb-v", 4, 8), Costs(sizes=drawn(2, 8))
    cap = 0.8 * max(simulate(schedule, costs).peak_memory)
    found = order_microbatches(schedule, drawn(2, 8), memory=cap)
    verify(lower(found))
    assert max(simulate(found, costs).peak_memory) <= cap * (1 + 1e-9)
    with pytest.raises(UsageError, match="leave out hop"):
        Costs(hop=1.0, links=[[0]])
    with pytest.raises(UsageError, match="there is a rank 1"):
        simulate(build("1f1b", 2, 2), Costs(links=[[0]]))


@pytest.mark.slow
def test_a_search_takes_sizes_too_and_never_beats_the_bound() -> None:
    for seed in range(3):
        costs = Costs(sizes=drawn(seed, 8), hop=0.1)
        found = search_report(3, 8, costs, memory=20, stages_per_rank=(1, 2), effort=30)
        verify(lower(found.schedule))
        timeline = simulate(found.schedule, found.costs)
        assert timeline.makespan == pytest.approx(found.value)
        assert max(timeline.peak_memory) <= 20 * (1 + 1e-9)
        for name in ("zb-v", "zb-h1", "1f1b", "gpipe"):
            built = build(name, 3, 8)
            each = Costs(sizes=drawn(seed, 8))
            assert lower_bound(built.placement, 8, each) <= simulate(built, each).makespan * (1 + 1e-9)


def test_where_memory_is_short_for_the_largest_microbatch_stages_recompute() -> None:
    costs = Costs(sizes=[1, 2, 3, 9], kept=0.1)
    found = search_report(2, 4, costs, memory=4, recompute=True, seconds=0)
    verify(lower(found.schedule))
    assert found.schedule.recompute == frozenset(found.chosen.recompute) != frozenset()
    assert max(found.timeline.peak_memory) <= 4 * (1 + 1e-9)
    assert found.lower_bound <= found.value == pytest.approx(found.makespan)


def test_an_aligned_schedule_stays_in_its_order() -> None:
    found = order_microbatches(build("zb-v", 4, 8), drawn(1, 8))
    assert align(found) == found


@pytest.mark.parametrize(
    ("ranks", "costs", "memory"),
    [
        (2, Costs(0.5, 0.5, 0.5, sizes=[0.71, 1.16, 2.1]), 6.0),
        (4, Costs(sizes=[0.73, 0.21, 1.04], hop=0.2), 8.0),
        (2, Costs(sizes=[1, 2, 1], held=2), 3.0),  # only full backwards fit
        (2, Costs(sizes=[1, 2, 1, 3], overlap=0.3), 8.0),  # a pair is worth most
    ],
)
def test_a_search_with_sizes_is_no_worse_than_a_family_that_fits(ranks: int, costs: Costs, memory: float) -> None:
    """As the family is built, and after `order_microbatches`."""
    sizes = costs.sizes or ()
    count = len(sizes)
    found = search_report(ranks, count, costs, memory, 1, effort=1)
    families = [build(name, ranks, count, 1) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
    families.append(build("interleaved-1f1b", ranks, count, 1, overlap_b_f=True))
    fitting = 0
    for family in families:
        for schedule in (family, order_microbatches(family, sizes, costs)):
            timeline = simulate(schedule, costs)
            if max(timeline.peak_memory) <= memory:
                fitting += 1
                assert found.value <= timeline.makespan * (1 + 1e-9)
    assert fitting
    assert max(found.timeline.peak_memory) <= memory * (1 + 1e-9)
    assert found.lower_bound <= found.value == pytest.approx(found.makespan)
    verify(lower(found.schedule))
