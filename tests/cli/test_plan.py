"""`penstock plan` from a shell: the table, JSON, files, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.planner.cluster import Cluster

CLUSTER = """hosts = 1
devices = 2
[device]
memory = 1e9
peak = 1e12
reserved = 1e8
"""
MODEL = ["gpt", "model.options.layers=4", "model.options.width=32", "--batch", "8", "--sequence", "16"]


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["plan", *arguments])
    return found.exit_code, found.output


def test_plans_are_printed_as_tables_and_as_json(cluster: str) -> None:
    code, text = run(*MODEL, "--cluster", cluster)
    assert code == 0
    assert all(words in text for words in ("layout", "activations", "products: "))
    code, text = run(*MODEL, "--cluster", cluster, "--json")
    document = json.loads(text)
    assert code == 0
    assert {plan["layout"]["pp"] * plan["layout"]["dp"] * plan["layout"]["tp"] for plan in document["plans"]} == {2}
    assert document["plans"][0]["seconds"] <= document["plans"][-1]["seconds"]
    assert set(document["plans"][0]["memory"][0]) >= {"weights", "gradients", "optimizer", "activations", "process"}


def test_the_best_plan_is_written_for_the_training_command(cluster: str, tmp_path: Path) -> None:
    code, text = run(*MODEL, "--cluster", cluster, "--save", str(tmp_path / "best.toml"))
    assert code == 0
    assert "penstock train" in text
    assert {path.name for path in tmp_path.iterdir()} >= {"best.toml", "best.schedule.json"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (MODEL, "say what to plan for: --cluster FILE, --here for this machine, or --from RUN"),
        ([*MODEL, "--cluster", "none.toml"], "there is no cluster none.toml; examples/clusters/ has some"),
        ([*MODEL, "--here", "--cluster", "none.toml"], "leave out --cluster and --from"),
        ([*MODEL, "--cluster", "none.toml", "--devices", "3"], "--devices is for --here"),
        ([*MODEL, "--cluster", "none.toml", "--number", "2"], "add --save FILE"),
        (["--check", "no/run", "--here"], "give it --cluster at most"),
        (["--check", "no/run", "--batch", "4"], "give it --cluster at most"),
        (["--from", "no/run", "--cluster", "none.toml"], "no/run is not the folder of a run that has trained"),
        ([*MODEL, "pipeline.schedule=gpipe", "--here"], "pipeline.schedule=gpipe: that is what a plan chooses"),
        ([*MODEL, "pipeline.workers=threads", "--here"], "plans are for ranks that are processes"),
        (["--check", "no/run"], "no/run is not the folder of a run that has trained"),
        (
            [*MODEL, "--cluster", str(Path(__file__).parents[2] / "examples/clusters/workstation.toml"), "--save", "."],
            "is a folder; name the file to write",
        ),
        (["m:f", "--cluster", "none.toml"], "planning would import and call model.source = 'm:f'"),
    ],
)
def test_what_cannot_work_is_refused_in_words(arguments: list[str], words: str) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert words in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hosts = 0", "hosts is 0; it takes a whole number from 1 to 100000"),
        ("hoosts = 2", "there is no key hoosts; did you mean hosts?"),
        ("[device]\nmemory = 1e9\nreserved = 2e9", "nothing is left for a model"),
        ("= 3", "Invalid"),
    ],
)
def test_a_wrong_cluster_is_refused_with_its_fault(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(line)
    code, text = run(*MODEL, "--cluster", str(path))
    assert code == 2
    assert words in text


@pytest.mark.parametrize("more", [[], ["--save", "none.toml"]])
def test_a_model_that_fits_nowhere_is_said_with_numbers(more: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("devices = 2\n[device]\nmemory = 1.112e8\nreserved = 1e8\n")
    code, text = run(*MODEL, "--cluster", str(path), *more)
    assert code == 1
    assert "no layout of 2 devices can train this model" in text


def test_a_table_that_states_one_key_keeps_the_defaults_of_the_others(tmp_path: Path) -> None:
    """`[inside]` with a latency alone had the bandwidth of links between hosts, a tenth: another plan won."""
    path = tmp_path / "cluster.toml"
    path.write_text("[inside]\nlatency = 1e-6\n[between]\nbandwidth = 5e9\n")
    found = Cluster.load(path)
    assert found.inside == replace(Cluster().inside, latency=1e-6)
    assert found.between == replace(Cluster().between, bandwidth=5e9)
    assert found.inside.bandwidth != Cluster().between.bandwidth
