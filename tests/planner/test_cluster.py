"""A cluster is read from a file, whose mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.planner.cluster import Cluster, Device


def read(folder: Path, text: str) -> Cluster:
    (folder / "mine.toml").write_text(text)
    return Cluster.load(folder / "mine.toml")


def test_what_a_file_leaves_out_is_as_in_a_cluster_that_is_made(tmp_path: Path) -> None:
    found = read(tmp_path, "hosts = 3\n[device]\nmemory = 40e9\n[inside]\nlatency = 1e-6\n")
    assert (found.world, found.room) == (24, 36e9)
    assert found == Cluster(hosts=3, device=Device(memory=40e9), inside=found.inside)
    assert found.inside.latency == 1e-6
    assert found.inside.bandwidth == read(tmp_path, "[inside]\n").inside.bandwidth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts = 0", r"hosts"),
        ("host = 2", r"host.*hosts"),
        ("[device]\nefficiency = 1.5", r"device\.efficiency"),
        ("[device]\nmemory = 'much'", r"device\.memory"),
        ("[software]\nname = 'other'", r"software\.name"),
        (
            "[device]\nmemory = 2e9\nreserved = 1.9e9",
            r"device\.reserved is 1\.9e\+09 bytes of the 1\.8e\+09 ",
        ),
        ("hosts = ", r"mine\.toml"),
    ],
)
def test_a_mistake_is_named_with_its_key(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named_with_some_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no cluster .*no\.toml; examples/clusters/ has some"):
        Cluster.load(tmp_path / "no.toml")


def test_the_clusters_of_the_examples_can_be_read() -> None:
    files = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))
    assert files
    for file in files:
        assert Cluster.load(file).world > 0


def test_another_efficiency_changes_nothing_else() -> None:
    cluster = Cluster(hosts=2)
    assert cluster.at(0.25).device.efficiency == 0.25
    assert cluster.at(0.25).at(cluster.device.efficiency) == cluster
