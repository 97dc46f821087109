"""Plans: what fits, what is fastest, and that no cheaper way was left out by the shortcuts of the ranking."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from planner_cases import SMALL, config, every_way, plans, profile

from penstock.errors import UsageError
from penstock.planner.candidates import default_families, families_for, splits_backward
from penstock.planner.cluster import Interconnect
from penstock.planner.fake_model import profile_config
from penstock.planner.layout import MeshLayout, layouts
from penstock.planner.plan import config_for
from penstock.planner.price import Pricing
from penstock.planner.ranking import RANKED, ROWS, SearchSpace, candidates, rank_plans, sizes_of_microbatches
from penstock.schedule import FAMILIES, build, simulate
from penstock.schedule.builders import BY_NAME


@pytest.mark.slow
@pytest.mark.parametrize("memory", [3.5e8, 10e9])
def test_the_ranking_is_that_of_all_ways_priced_one_by_one(memory: float) -> None:
    """Bounds, shortcuts and shared figures save work, and change nothing."""
    cluster = replace(SMALL, device=replace(SMALL.device, memory=memory))
    best: dict[MeshLayout, float] = {}
    for layout in layouts(cluster, most_stages=14, heads=8, batch=32, divisible=True):
        for way in every_way(layout, cluster):
            if way.fullest.process <= cluster.room:
                key = replace(layout, inner="dp")
                best[key] = min(best.get(key, inf), way.seconds)
    found = plans(cluster)
    first, *others = sorted(best.values())[:RANKED]
    assert [plan.seconds for plan in found.ranked[1:]] == pytest.approx(others, rel=1e-9)
    assert {replace(plan.layout, inner="dp"): plan.seconds for plan in found.ranked[1:]} == pytest.approx(
        {key: seconds for key, seconds in best.items() if first < seconds <= max(others)}, rel=1e-9
    )
    assert 0.9 * first <= found.best.seconds <= first * (1 + 1e-9)  # a searched schedule may beat every family


@pytest.mark.parametrize("layout", [MeshLayout(1, 8), MeshLayout(2, 4, sharded=True), MeshLayout(4, 2), MeshLayout(8)])
def test_no_way_is_faster_or_smaller_than_its_bounds_say(layout: MeshLayout) -> None:
    for way in every_way(layout):
        assert way.bound <= way.seconds * (1 + 1e-9), way
        assert way.least_bytes <= way.fullest.process * (1 + 1e-9), way
        average = way.pricing.average(way.states).process
        assert average <= way.least_bytes * (1 + 1e-9), way


@pytest.mark.parametrize("name", [name for name in default_families() if FAMILIES[name].cap])
def test_a_family_holds_no_more_than_its_cap_by_which_its_warm_up_is_bounded(name: str) -> None:
    entry = FAMILIES[name]
    assert entry.cap is not None
    for ranks, microbatches in ((2, 1), (2, 7), (3, 9), (4, 16), (6, 11), (8, 24)):
        for per_rank in (2, 3) if entry.layout == "loop" else (entry.stages_per_rank,):
            held = simulate(build(name, ranks, microbatches, per_rank)).peak_activations
            assert max(held) <= entry.cap(ranks, per_rank), (ranks, microbatches, per_rank)


def test_plans_are_ranked_and_use_every_device() -> None:
    found = plans()
    assert [plan.seconds for plan in found.ranked] == sorted(plan.seconds for plan in found.ranked)
    for plan in found.ranked:
        assert plan.layout.world == 8
        assert plan.rows * plan.microbatches * plan.layout.dp == 32
        assert plan.peak.process <= SMALL.room == 9e9  # a tenth stays free
        assert sum(plan.counts) == 14  # embedding, blocks, head
        assert min(plan.counts) >= 1
        assert plan.schedule.ranks == plan.layout.pp


def test_what_does_not_fit_is_rejected_with_its_numbers() -> None:
    tight = replace(SMALL, device=replace(SMALL.device, memory=4e8))
    found = plans(tight)
    replicas = next(each for each in found.rejected if each.layout == MeshLayout(1, 8))
    assert "per device, of 360 MB that a plan may fill" in replicas.why
    assert "optimizer" in replicas.why
    assert all(plan.peak.process <= 3.6e8 for plan in found.ranked)


def test_more_memory_as_advised_gives_the_plan_that_was_promised() -> None:
    """It once added up the bytes of one plan and the seconds of another."""
    tight = replace(SMALL, device=replace(SMALL.device, memory=3.4e8))
    found = plans(tight)
    advice = next(line for line in found.advice if line.startswith("memory: with "))
    amount, unit, seconds = re.match(r"memory: with ([\d.]+) (\w+) more .* take ([\d.]+) s", advice).groups()  # type: ignore[union-attr]
    more = 1.01 * float(amount) * {"MB": 1e6, "GB": 1e9}[unit]
    assert plans(replace(tight, device=replace(tight.device, memory=3.4e8 + more))).best.seconds <= 1.001 * float(
        seconds
    )


@pytest.mark.slow
def test_fewer_devices_are_named_where_they_do_as_well() -> None:
    """More devices once gave a slower plan without a word."""
    slow = replace(SMALL, hosts=8, between=Interconnect(bandwidth=1e7, latency=1e-2))
    whole = plans(slow)
    advice = next(line for line in whole.advice if line.startswith("devices: "))
    world, seconds = re.match(r"devices: (\d+) of the 32 take ([\d.]+) s", advice).groups()  # type: ignore[union-attr]
    assert world == "4"  # one host
    part = plans(replace(slow, hosts=1))
    assert part.best.seconds <= 1.001 * float(seconds) < whole.best.seconds
    assert not any(line.startswith("devices: ") for line in part.advice)


def test_batches_that_few_powers_of_two_divide_are_divided_by_other_numbers() -> None:
    assert sizes_of_microbatches(31, ROWS) == [1, 31]
    assert sizes_of_microbatches(12, ROWS) == [1, 2, 3, 4, 6, 12]
    assert sizes_of_microbatches(1536, ROWS) == list(ROWS)
    assert sizes_of_microbatches(12, (4,)) == [4]


def test_more_memory_is_never_slower() -> None:
    times = [plans(replace(SMALL, device=replace(SMALL.device, memory=size))).best.seconds for size in (4e8, 1e9, 1e10)]
    assert times == sorted(times, reverse=True)


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    odd = config_for("gpt", batch=7, sequence=16, options={"layers": 2, "width": 32})
    with pytest.raises(UsageError, match="a batch of 7 rows cannot be divided over 1009 devices"):
        rank_plans(odd, profile_config(odd, SMALL.software), replace(SMALL, hosts=1009, devices=1))


def test_families_are_read_from_the_table_so_that_a_new_one_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that the planner does not name: it is found, seen to split its backwards, and priced."""
    monkeypatch.setitem(FAMILIES, "new", replace(FAMILIES["zb-h1"], name="new", aliases=()))
    monkeypatch.setitem(BY_NAME, "new", FAMILIES["new"])
    assert families_for(4, 1, ["new", "zb-v", "forward-only"]) == ["new"]
    assert splits_backward("new")
    found = rank_plans(config(), profile(), SMALL, among=[MeshLayout(4, 2)], space=SearchSpace(32, 2.0, ["new"]))
    assert found.best.family in ("new", "searched")


def test_default_families_leave_out_only_what_another_of_its_kind_beats() -> None:
    found = default_families()
    assert {"1f1b", "interleaved-1f1b", "zb-v", "v-half", "v-min"} <= set(found)
    assert not {"forward-only", "gpipe"} & set(found)


def test_gradients_count_from_the_first_backward_on_and_throughout_where_passes_accumulate() -> None:
    """All forwards of gpipe come before the first gradient; the sum of both peaks was up to 12 % above a real step's.

    1f1b holds as many activations after its first backward as before, so there the sum is right.
    """

    def way(name: str) -> Any:
        space = SearchSpace(4, 2.0, [name], (False,), (1,), (1,))
        return next(candidates(MeshLayout(2), lambda *each: Pricing(profile(), SMALL, *each), space))

    for name, is_less in (("gpipe", True), ("1f1b", False)):
        found = way(name)
        stage = found.own[1][0]
        alone, together = found.peaks[1]
        gradients = found.pricing.gradient_bytes(stage)
        expected = max(alone, alone - stage.saved + gradients) if is_less else alone + gradients
        assert together == pytest.approx(expected)
        assert found.memory[1].gradients == gradients
        assert found.memory[1].activations == alone
        accumulated = replace(found, accumulated=True)
        assert accumulated.peaks[1] == (alone + gradients, alone + 2 * gradients)
        assert accumulated.memory[1].process > found.memory[1].process
