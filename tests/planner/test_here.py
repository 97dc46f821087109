"""Plans for this machine: what is measured, and that a plan is made of it."""

from __future__ import annotations

import pytest

import penstock
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.here import MeasuredCosts, MeasuredPricing, settings_of
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.ranking import SearchSpace, candidates
from penstock.schedule import Costs

OPTIONS = {"layers": 4, "width": 32, "heads": 4}
CLUSTER = Cluster(hosts=1, devices=2)


def test_ways_that_differ_in_order_and_number_of_microbatches_share_one_measurement() -> None:
    config = config_for("gpt", batch=16, sequence=16, options=OPTIONS)
    profile = profile_config(config, CLUSTER.software)

    def ways(known: dict[object, MeasuredCosts] | None = None) -> list[object]:
        space = SearchSpace(16, 2.0, ["1f1b", "gpipe", "zb-h1", "zb-h2"], (False,), (2, 4), (1,))
        return list(candidates(MeshLayout(2), lambda *each: MeasuredPricing(profile, CLUSTER, *each, known), space))

    settings = settings_of(ways())
    assert sorted((each.rows, each.split) for each in settings) == [(2, False), (2, True), (4, False), (4, True)]
    known = {
        each.key: MeasuredCosts(Costs([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), around=0.5, spread=0.0) for each in settings
    }
    for way in ways(known):
        assert [stage.forward for stage in way.stages] == [1.0, 2.0]  # type: ignore[attr-defined]
        assert way.around == (0.0, 0.5)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_this_machine_is_measured_on_processes_and_planned_for() -> None:
    found = penstock.plan(
        "gpt", batch=4, sequence=16, options=OPTIONS, devices=2, layout=MeshLayout(2), schedules=["1f1b"]
    )
    assert found.cluster.name == "this machine"
    assert found.best.layout == MeshLayout(2)
    assert found.best.seconds > 0
    assert 0.05 <= found.best.error <= 1
    assert found.best.peak.process < found.cluster.room
