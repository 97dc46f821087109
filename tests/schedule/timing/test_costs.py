"""What things cost."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.schedule import Costs, Topology, build, simulate


def test_one_number_serves_for_all_stages() -> None:
    assert Costs(forward=2).per_stage("forward", 3) == (2, 2, 2)
    assert Costs(forward=[1, 2, 3]).per_stage("forward", 3) == (1, 2, 3)


def test_a_full_backward_takes_both_halves() -> None:
    costs = Costs(forward=1, input=[2, 3], weight=[4, 5])
    assert costs.by_op(2) == [(1, 1), (6, 8), (2, 3), (4, 5)]


def test_what_stays_between_the_halves_is_all_unless_said() -> None:
    assert Costs(activation=[3, 4]).per_stage("held", 2) == (3, 4)
    assert Costs(activation=3, held=1).per_stage("held", 2) == (1, 1)


def test_a_message_takes_its_hop_or_latency_and_bytes_over_bandwidth() -> None:
    assert Costs(hop=2).wire(0, 1, (0, 1)) == (0, 2)
    assert Costs(latency=2).wire(0, 1, (0, 1)) == (0, 2)
    assert Costs(latency=2, bandwidth=4, bytes=8).wire(0, 1, (0, 1)) == (2, 2)
    assert Costs(bandwidth=4, bytes=[8, 12]).wire(1, 2, (0, 1)) == (3, 0)
    assert Costs(bandwidth=4, bytes={(0, 1): 8, (0, 2): 4}).wire(0, 2, (0, 1)) == (1, 0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"forward": -1}, "forward must be 0 or more and finite, got -1"),
        ({"weight": [1, -2]}, "weight must be 0 or more and finite, got -2"),
        ({"input": float("nan")}, "input must be 0 or more and finite, got nan"),
        ({"forward": float("inf")}, "forward must be 0 or more and finite, got inf"),
        ({"forward": "fast"}, "forward takes one number or one for each stage, got 'fast'"),
        ({"hop": -1}, "hop must be 0 or more"),
        ({"latency": -1}, "latency must be 0 or more"),
        ({"bandwidth": 0, "bytes": 1}, "bandwidth must be above 0, got 0"),
        ({"bandwidth": 1, "bytes": -1}, "bytes must be 0 or more"),
        ({"bandwidth": 1, "bytes": {(0, 1): -1}}, "bytes must be 0 or more"),
        ({"bandwidth": 1, "bytes": {"a": 1}}, "bytes names edges .* got 'a'"),
        ({"overlap": {(0, "b"): 0.5}}, r"overlap names pairs .* got \(0, 'b'\)"),
        ({"bytes": 5}, "give bandwidth, or hop instead"),
        ({"hop": 1, "latency": 1}, "either hop, or latency and bandwidth"),
        ({"hop": 1, "bandwidth": 1}, "either hop, or latency and bandwidth"),
    ],
)
def test_costs_that_are_none_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Costs(**wrong)


@pytest.mark.parametrize("name", ["forward", "input", "weight", "activation", "held"])
def test_the_wrong_number_of_stages_is_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: [1, 1, 1]}
    with pytest.raises(UsageError, match=f"{name} has 3 numbers for 2 stages; give one per stage, or a single"):
        simulate(build("1f1b", 2, 2), Costs(**wrong))


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([1, 1, 1], "bytes has 3 numbers for 2 stages"),
        ([1], "bytes has 1 numbers for 2 stages"),
        ({(0, 2): 1, (0, 1): 1}, r"\(0, 2\): no such edge"),
        ({}, r"\(0, 1\): no bytes for that edge"),
    ],
)
def test_bytes_for_other_edges_than_there_are_is_refused(sizes: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        simulate(build("1f1b", 2, 2), Costs(bandwidth=1, bytes=sizes))
    Costs(bandwidth=1, bytes={(0, 1): 1}).check_edges(Topology.chain(2))
