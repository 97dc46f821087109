"""Lower bounds: close to the best there is on small pipelines, and never above anything real."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import tiers
from tools.search.bounds.small_pipelines import instance
from tools.search.exact_optimum import optimum

from penstock.schedule import Costs, Placement, build, lower_bound, search_report, simulate
from penstock.schedule.builders import TRAINING
from penstock.tools.search.bounds.lower_bound import NoRoom

ROUNDING = 1 + 1e-9


@pytest.mark.timeout(3600)  # a busy machine takes its time
@pytest.mark.parametrize("count", tiers(16, 300))
def test_the_bound_is_close_to_the_proven_optimum_and_never_above_it(count: int) -> None:
    """Caps for all ranks or each, hops, slow links, stages and ranks that differ; the optimum is the exact solver's."""
    shares = []
    for seed in range(count):
        case = instance(seed)
        best = optimum(*case)
        assert best is not None
        quick, bound = lower_bound(*case, quick=True), lower_bound(*case)
        assert quick <= bound * ROUNDING
        assert bound <= best * ROUNDING, seed
        shares.append(bound / best)
    assert min(shares) >= 0.95
    assert sum(shares) / len(shares) >= 0.99


@pytest.mark.timeout(3600)  # a busy machine takes its time
@pytest.mark.parametrize("count", tiers(2, 120))
def test_of_microbatches_that_differ_the_bound_is_never_above_the_optimum(count: int) -> None:
    for seed in range(count):
        case = instance(seed, sized=True)
        best = optimum(*case)
        assert best is not None
        assert lower_bound(*case) <= best * ROUNDING, seed


@pytest.mark.timeout(3600)  # a busy machine takes its time
@pytest.mark.parametrize("count", tiers(8, 300))
def test_no_schedule_that_the_search_finds_is_below_the_bound(count: int) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        times = [draw.uniform(0.1, 5) for _ in range(3)]
        costs = Costs(*times, hop=draw.choice((0.0, draw.uniform(0, 2))))
        ranks, microbatches, size = draw.randint(1, 4), draw.randint(1, 5), draw.choice((1, 2))
        memory = draw.choice((None, 1, draw.uniform(1, ranks + 1)))
        found = search_report(ranks, microbatches, costs, memory, size, seconds=0)
        bound = lower_bound(found.schedule.placement, microbatches, found.costs, memory)
        assert bound <= simulate(found.schedule, found.costs).makespan * ROUNDING, seed


def test_one_microbatch_at_a_time_takes_as_long_as_its_way_through_all_stages() -> None:
    """Memory for one: each waits until the one before has come all the way back, and had its W."""
    costs = Costs(forward=5, input=2, weight=3)
    assert lower_bound(Placement.loop(4), 7, costs, memory=1) == 7 * (4 * 5 + 4 * 2 + 3)


def test_a_link_that_is_slower_than_every_rank_sets_the_pace() -> None:
    """Ten messages of 6 each way on the only link, after the first F and before the last I."""
    costs = Costs(bandwidth=0.5, bytes=[3, 0])
    assert lower_bound(Placement.loop(2), 10, costs) >= 1 + 10 * 6 + 1 + 1 + 6 + 1
    assert lower_bound(Placement.loop(2), 10, costs) <= simulate(build("zb-h2", 2, 10), costs).makespan


numbers = st.floats(0.0, 5.0, allow_nan=False).map(lambda value: round(value, 3))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_schedule_beats_the_bound_on_slow_links_with_pairs_and_under_its_own_memory(data: st.DataObject) -> None:
    check_families(data, ranks=5, microbatches=9, quick=True)


@pytest.mark.timeout(3600)  # a busy machine takes its time
@pytest.mark.parametrize("count", tiers(20, 200))
def test_no_small_schedule_beats_the_bound_by_refutation(count: int) -> None:
    @settings(max_examples=count, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        check_families(data, ranks=3, microbatches=4, quick=False)

    check()


def check_families(data: st.DataObject, ranks: int, microbatches: int, quick: bool) -> None:
    """Schedules of all families under random costs, which are real whatever the bound says."""
    name = data.draw(st.sampled_from(TRAINING))
    schedule = build(name, data.draw(st.integers(1, ranks)), data.draw(st.integers(1, microbatches)))
    stages = schedule.stages
    lists = st.lists(numbers, min_size=stages, max_size=stages)
    times = {key: data.draw(numbers | lists) for key in ("forward", "input", "weight", "activation")}
    held = data.draw(st.sampled_from((None, 0.5, 2.0)))
    if held is not None:
        sizes = Costs(activation=times["activation"]).per_stage("activation", stages)
        times["held"] = [held * size for size in sizes]
    costs = Costs(
        **times,
        latency=data.draw(numbers),
        bandwidth=data.draw(st.sampled_from((None, 1.0))),
        bytes=0.0,
        overlap=data.draw(st.sampled_from((None, 0.5, 0.9))),
    )
    if costs.bandwidth is not None:
        costs = Costs(**times, latency=costs.latency, bandwidth=1.0, bytes=data.draw(lists), overlap=costs.overlap)
    timeline = simulate(schedule, costs)
    for memory in (None, [max(peak, 1e-6) for peak in timeline.peak_memory]):
        bound = lower_bound(schedule.placement, schedule.microbatches, costs, memory, quick=quick)
        assert bound <= timeline.makespan * ROUNDING + 1e-9


@pytest.mark.parametrize(
    ("costs", "recompute", "least"), [(Costs(), (), 1), (Costs(kept=0.6), [0, 1], 1), (Costs(sizes=[1, 3, 1]), (), 3)]
)
def test_where_not_one_microbatch_fits_there_is_no_bound(costs: Costs, recompute: Sequence[int], least: float) -> None:
    """A stage that recomputes keeps less, but its backward needs all of it."""
    with pytest.raises(NoRoom, match=rf"memory 0.9 is too little for rank 0: one microbatch alone holds {least} there"):
        lower_bound(Placement.loop(2), 3, costs, memory=0.9, recompute=recompute)
    assert lower_bound(Placement.loop(2), 3, costs, memory=least, recompute=recompute, quick=True) > 0
