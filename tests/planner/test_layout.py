"""How a model is laid out on a cluster: which layouts there are, what stands where, and what links then take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_cases import SMALL

from penstock.planner.layout import MeshLayout, all_reduce, gather, layouts


def test_sums_cross_hosts_with_each_devices_own_part() -> None:
    layout = MeshLayout(dp=8)  # four on each of two hosts
    inside, between = 2 * 3 / 4 * 8e9 / 2e10, 2 * (8e9 / 4) / 2 / 2e9
    latency = 2 * (3 * 1e-5 + 5e-5)
    assert all_reduce(8e9, layout, "dp", SMALL) == pytest.approx(inside + between + latency)
    assert layout.wire("dp", SMALL) is SMALL.between
    assert MeshLayout(pp=2, dp=4).wire("dp", SMALL) is SMALL.inside
    assert MeshLayout(pp=2, dp=4).wire("pp", SMALL) is SMALL.between
    assert MeshLayout(pp=2, dp=4, inner="pp").wire("pp", SMALL) is SMALL.inside


def every(**limits: Any) -> list[MeshLayout]:
    return list(layouts(SMALL, **{"most_stages": 14, "heads": 8, "batch": 32, "divisible": True, **limits}))


def test_every_layout_uses_all_devices_and_divides_the_batch() -> None:
    found = every()
    assert len(found) == len(set(found))
    assert {each.world for each in found} == {8}
    assert {each.tp for each in found} == {1, 2, 4}  # within a host
    assert {(each.pp, each.dp, each.tp) for each in found} == {
        (pp, 8 // tp // pp, tp) for tp in (1, 2, 4) for pp in (1, 2, 4, 8) if pp * tp <= 8
    }
    assert all(each.dp > 1 for each in found if each.sharded)
    assert {each.dp for each in every(batch=6)} == {1, 2}


def test_a_model_limits_its_layouts() -> None:
    assert {each.pp for each in every(most_stages=3)} == {1, 2}
    assert {each.tp for each in every(heads=6)} == {1, 2}
    assert {each.tp for each in every(divisible=False)} == {1}


def test_either_axis_may_be_inside_hosts_where_that_differs() -> None:
    inner = {(each.pp, each.dp) for each in every(divisible=False) if each.inner == "pp"}
    assert inner == {(2, 4), (4, 2)}
    other = replace(SMALL, software=replace(SMALL.software, name="megatron"))
    assert all(each.inner == "dp" for each in layouts(other, most_stages=14, heads=8, batch=32, divisible=True))


def test_neighbours_of_an_axis_are_as_far_apart_as_the_axes_inside_of_it_are_large() -> None:
    layout = MeshLayout(pp=2, dp=3, tp=4, cp=5)
    assert [layout.stride(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 4, 20, 60]
    turned = replace(layout, inner="pp")
    assert [turned.stride(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 4, 40, 20]


def test_a_layout_in_words() -> None:
    assert str(MeshLayout(2, 4, sharded=True)) == "pp 2 x dp 4 sharded"
    assert str(MeshLayout(2, 4, 2, inner="pp")) == "pp 2 x dp 4 x tp 2, pp inside hosts"


def test_nothing_and_one_rank_are_gathered_at_once() -> None:
    assert gather(8e9, MeshLayout(pp=8), "dp", SMALL) == 0.0
    assert gather(0.0, MeshLayout(dp=8), "dp", SMALL) == 0.0
