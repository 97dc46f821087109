"""Lower bounds: close to the best there is on small pipelines, and never above anything real."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule.exact_optimum import optimum

from penstock.schedule import Costs, Placement, build, lower_bound, simulate

ROUNDING = 1 + 1e-9
FAMILIES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v"]


def instances(count: int) -> Iterator[tuple[Placement, int, Costs, int | None]]:
    """Small pipelines with whole-number costs and caps from one microbatch to all that 1F1B holds."""
    draw = random.Random(19)
    for _ in range(count):
        kind = draw.choice(("loop", "loop", "loops", "v"))
        ranks = draw.choice((2, 3, 4) if kind == "loop" else (2, 2, 3))
        microbatches = draw.randint(3, 7) if kind == "loop" else draw.randint(2, 4)
        size = 1 if kind == "loop" else 2
        placement = Placement.v(ranks) if kind == "v" else Placement.loop(ranks, size)
        even = draw.random() < 0.5
        times = [
            draw.randint(1, most) if even else [draw.randint(1, most) for _ in range(placement.stages)]
            for most in (5, 5, 4)
        ]
        hop, activation = draw.choice((0, 0, 1, 2)), draw.choice((1, 2))
        held = draw.choice((activation, activation, 1))
        cap = activation * draw.randint(size, size * ranks)
        costs = Costs(*times, hop=hop, activation=activation, held=held)
        yield placement, microbatches, costs, None if draw.random() < 0.15 else cap


@pytest.mark.slow
def test_the_bound_is_close_to_the_proven_optimum_and_never_above_it() -> None:
    shares = []
    for placement, microbatches, costs, cap in instances(40):
        bound, best = lower_bound(placement, microbatches, costs, cap), optimum(placement, microbatches, costs, cap)
        assert bound <= best * ROUNDING
        shares.append(bound / best)
    assert min(shares) >= 0.9
    assert sum(share >= 0.95 for share in shares) >= 37
    assert sum(shares) / len(shares) >= 0.98


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
    name = data.draw(st.sampled_from(FAMILIES))
    schedule = build(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)))
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
        bound = lower_bound(schedule.placement, schedule.microbatches, costs, memory)
        assert bound <= timeline.makespan * ROUNDING + 1e-9
