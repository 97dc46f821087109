"""Plans: what fits, what is fastest, and that no cheaper way was left out by the shortcuts of the ranking."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import penstock
from penstock.errors import UsageError
from penstock.planner.cluster import Cluster, Device, Wire
from penstock.planner.layout import Layout, all_reduce, layouts
from penstock.planner.plan import config_for
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile, profile_config
from penstock.planner.ranking import Plans, Wanted, candidates, rank_plans, states_of
from penstock.train.config.settings import TrainConfig

SMALL = Cluster(
    hosts=2,
    devices=4,
    device=Device(memory=10e9, peak=1e13, efficiency=0.5, bandwidth=5e11, reserved=1e8),
    inside=Wire(bandwidth=2e10, latency=1e-5),
    between=Wire(bandwidth=2e9, latency=5e-5),
)


def config() -> TrainConfig:
    return config_for(
        "gpt", batch=32, sequence=128, options={"layers": 12, "width": 512, "heads": 8, "vocabulary": 1000}
    )


@cache
def profile() -> Profile:
    return profile_config(config(), SMALL.software)


def plans(cluster: Cluster = SMALL) -> Plans:
    return rank_plans(config(), profile(), cluster)


@pytest.mark.slow
def test_the_best_plan_is_the_best_of_all_ways_priced_one_by_one() -> None:
    wanted = Wanted(32, states_of(config()))
    every = layouts(SMALL, most_stages=14, heads=8, batch=32, divisible=True)
    found = [
        candidate.priced.makespan + sum(candidate.around)
        for layout in every
        for candidate in candidates(layout, lambda where, rows: Pricing(profile(), SMALL, where, rows), wanted)
        if max(each.total for each in candidate.priced.memory) <= SMALL.device.memory
    ]
    best = plans().best
    assert best.seconds <= min(found) * (1 + 1e-9)  # a searched schedule may be faster than every family
    assert best.seconds >= 0.9 * min(found)


def test_plans_are_ranked_and_use_every_device() -> None:
    found = plans()
    assert [plan.seconds for plan in found.ranked] == sorted(plan.seconds for plan in found.ranked)
    for plan in found.ranked:
        assert plan.layout.world == 8
        assert plan.rows * plan.microbatches * plan.layout.dp == 32
        assert plan.peak.total <= SMALL.device.memory
        assert sum(plan.counts) == 14  # embedding, blocks, head
        assert min(plan.counts) >= 1
        assert plan.schedule.ranks == plan.layout.pp


def test_what_does_not_fit_is_rejected_with_its_numbers() -> None:
    tight = replace(SMALL, device=replace(SMALL.device, memory=4e8))
    found = plans(tight)
    replicas = next(each for each in found.rejected if each.layout == Layout(1, 8))
    assert "GB of 0.4 per device at best" in replicas.why
    assert "optimizer" in replicas.why
    assert all(plan.peak.total <= 4e8 for plan in found.ranked)


def test_a_model_that_fits_nowhere_says_so() -> None:
    with pytest.raises(UsageError, match="no layout of 8 devices can train this model"):
        _ = plans(replace(SMALL, device=replace(SMALL.device, memory=1.5e8))).best


def test_more_memory_is_never_slower() -> None:
    times = [plans(replace(SMALL, device=replace(SMALL.device, memory=size))).best.seconds for size in (4e8, 1e9, 1e10)]
    assert times == sorted(times, reverse=True)


def test_sums_cross_hosts_with_each_devices_own_part() -> None:
    layout = Layout(dp=8)  # four on each of two hosts
    inside, between = 2 * 3 / 4 * 8e9 / 2e10, 2 * (8e9 / 4) / 2 / 2e9
    latency = 2 * (3 * 1e-5 + 5e-5)
    assert all_reduce(8e9, layout, "dp", SMALL) == pytest.approx(inside + between + latency)
    assert layout.wire("dp", SMALL) is SMALL.between
    assert Layout(pp=2, dp=4).wire("dp", SMALL) is SMALL.inside
    assert Layout(pp=2, dp=4).wire("pp", SMALL) is SMALL.between
    assert Layout(pp=2, dp=4, inner="pp").wire("pp", SMALL) is SMALL.inside


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    odd = config_for("gpt", batch=7, sequence=16, options={"layers": 2, "width": 32})
    with pytest.raises(UsageError, match="a batch of 7 rows cannot be divided over 1009 devices"):
        rank_plans(odd, profile_config(odd, SMALL.software), replace(SMALL, hosts=1009, devices=1))


def test_the_public_function_takes_a_cluster_and_refuses_a_strange_model() -> None:
    found = penstock.plan("gpt", SMALL, batch=8, sequence=16, options={"layers": 4, "width": 32}, layout=Layout(2, 4))
    assert [plan.layout for plan in found.ranked] == [Layout(2, 4)]
    with pytest.raises(UsageError, match="plan\\(\\) takes"):
        penstock.plan("llama", SMALL)
