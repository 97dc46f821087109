"""`penstock plan` from a shell: the table, JSON, files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app

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
        ("hosts = 0", "hosts is 0; it takes a whole number, 1 or more"),
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


def test_a_model_that_fits_nowhere_is_said_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("devices = 2\n[device]\nmemory = 1.112e8\nreserved = 1e8\n")
    code, text = run(*MODEL, "--cluster", str(path))
    assert code == 1
    assert "no layout of 2 devices can train this model" in text
