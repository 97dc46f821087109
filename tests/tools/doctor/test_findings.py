"""What an examination found, as a document and as a cluster for plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.planner.cluster import Cluster
from penstock.tools.doctor.findings import Examination, Finding

MACHINE = {"device": 'Accelerator "X"', "devices": ["X"] * 4}
PRODUCTS = Finding(
    "products", "INFO", "", {"devices": 4, "dtype": "bfloat16", "flops": 2.5e14, "bandwidth": 1.2e12, "memory": 8e10}
)
PAIRS = {"0-1": {"bandwidth": 2e11, "latency": 8e-6}, "0-2": {"bandwidth": 1e11, "latency": 1.2e-5}}
LINKS = Finding("links", "INFO", "", {"pairs": {**PAIRS, "1-2": {"bandwidth": 3e10, "latency": 2e-5}}})


def test_a_measured_machine_is_a_cluster_that_plans_read(tmp_path: Path) -> None:
    text = Examination(MACHINE, (PRODUCTS, LINKS)).cluster()
    assert text is not None
    (tmp_path / "here.toml").write_text(text)
    cluster = Cluster.load(tmp_path / "here.toml")
    assert (cluster.name, cluster.hosts, cluster.devices) == ('Accelerator "X"', 1, 4)
    assert (cluster.device.memory, cluster.device.peak, cluster.device.efficiency) == (8e10, 2.5e14, 1.0)
    assert cluster.inside.bandwidth == pytest.approx(1e11)
    assert cluster.inside.latency == pytest.approx(1.2e-5)


@pytest.mark.parametrize("findings", [(), (PRODUCTS,), (LINKS,), (PRODUCTS, Finding("links", "FAIL", "hung"))])
def test_what_was_not_measured_makes_no_cluster(findings: tuple[Finding, ...]) -> None:
    assert Examination(MACHINE, findings).cluster() is None


def test_a_failed_check_is_in_the_document_with_all_that_is_known() -> None:
    failed = Finding("zb-v on 2", "FAIL", "rank 0: it hung", details="a traceback")
    document = json.loads(json.dumps(Examination(MACHINE, (PRODUCTS, failed)).document()))
    assert document["passed"] is False
    assert document["findings"][1]["details"] == "a traceback"
    assert document["machine"]["devices"] == ["X"] * 4
