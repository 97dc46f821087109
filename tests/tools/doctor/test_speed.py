"""What the ranks of `penstock doctor` measure, on real processes."""

from __future__ import annotations

import pytest
import torch
from processes import on_processes

from penstock.tools.doctor import speed
from penstock.tools.doctor.ranks import Place


def measure(name: str) -> dict[str, object]:
    place = Place(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    return dict(getattr(speed, name)(place))


@pytest.mark.slow
def test_every_pair_of_devices_is_measured_once_by_its_lower_rank() -> None:
    found = [each["pairs"] for each in on_processes(3, measure, "measure_links")]
    assert [list(pairs) for pairs in found] == [["0-1", "0-2"], ["1-2"], []]
    assert all(each["latency"] > 0 and each["bandwidth"] > 0 for pairs in found for each in pairs.values())


@pytest.mark.slow
def test_overlap_is_a_share_that_two_ranks_measure() -> None:
    first, second, third = on_processes(3, measure, "measure_overlap")
    assert 0 <= first["hidden"] <= 1
    assert 0 <= second["hidden"] <= 1
    assert third == {}


def test_products_have_what_a_cluster_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.dist, "barrier", lambda: None)
    found = speed.measure_products(Place(0, 1, torch.device("cpu")))
    assert found["dtype"] == "float32"
    assert min(found["flops"], found["bandwidth"], found["memory"]) > 0
