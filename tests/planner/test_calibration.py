"""A run's folder calibrates a cluster: what is read from it, and that the efficiency comes back that made its times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.planner.calibration import RecordedRun, calibrate, candidate_of, cluster_of, from_run, read_run
from penstock.planner.cluster import Cluster, Device, Interconnect
from penstock.planner.fake_model import profile_config
from penstock.planner.plan import config_for
from penstock.tools.train.config.read import to_document
from penstock.tools.train.config.settings import TrainConfig

TWO = Cluster(
    hosts=1,
    devices=2,
    device=Device(memory=1e9, peak=1e11, efficiency=0.4, bandwidth=1e10, reserved=1e8),
    inside=Interconnect(bandwidth=5e9, latency=5e-5),
)


def config() -> TrainConfig:
    found = config_for("gpt", batch=8, sequence=16, options={"layers": 4, "width": 32, "heads": 4})
    return replace(found, pipeline=replace(found.pipeline, ranks=2, stages=2, microbatches=4))


def ran(seconds: float) -> RecordedRun:
    return RecordedRun(Path("run"), config(), seconds, 0.0, [], None)


def write_run(root: Path, seconds: list[float]) -> Path:
    """A folder as a run leaves it."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(to_document(config())))
    (root / "metrics.jsonl").write_text("".join(json.dumps({"seconds": each}) + "\n" for each in seconds))
    kinds = {"weights": 1e6, "gradients": 1e6, "optimizer": 2e6, "activations": 3e6, "process": 3e8}
    (root / "memory.json").write_text(json.dumps([kinds, kinds]))
    return root


@pytest.mark.slow
def test_the_efficiency_comes_back_that_made_the_time_of_a_step() -> None:
    profile = profile_config(config(), TWO.software)
    seconds = candidate_of(config(), profile, TWO.at(0.17)).seconds
    assert calibrate(TWO, profile, ran(seconds)).device.efficiency == pytest.approx(0.17, rel=1e-3)


def test_a_step_faster_than_the_peak_allows_is_refused_with_both_times() -> None:
    profile = profile_config(config(), TWO.software)
    with pytest.raises(UsageError, match=r"a step took 1e-06 s, but would take .* state a higher peak"):
        calibrate(TWO, profile, ran(1e-6))


def test_a_run_is_read_without_its_first_steps_and_with_its_spread(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [9.0, 9.0, 9.0, 1.0, 1.2, 1.0, 0.8, 1.0]))
    assert run.seconds == 1.0
    assert run.spread == pytest.approx(0.2)
    profile = profile_config(config(), TWO.software)
    assert cluster_of(run, profile, memory=2e9).device.reserved == 3e8 - 7e6
    assert from_run(run, profile, TWO).error == pytest.approx(0.2)  # never less than 5 %


def test_a_few_steps_tell_nothing_of_their_spread(tmp_path: Path) -> None:
    """Of a run with four steps one counts; it was said to differ by 0 % from itself."""
    run = read_run(write_run(tmp_path / "run", [9.0, 9.0, 9.0, 1.0]))
    assert (run.seconds, run.spread) == (1.0, None)
    assert from_run(run, profile_config(config(), TWO.software), TWO).error == TWO.error


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_that_is_too_short_says_how_many_steps_tell_something(steps: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"has {steps} steps; 4 or more tell what a step takes"):
        read_run(write_run(tmp_path / "run", [1.0] * steps))


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not the folder of a run that has trained: there is no config\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", '{"model": ', r"config\.json: it is not JSON"),
        ("metrics.jsonl", '{"seconds": 1.0}\n{"sec', r"metrics\.jsonl: it is not JSON"),
        ("metrics.jsonl", "[1]\n" * 6, r"metrics\.jsonl: it holds a list"),
        ("metrics.jsonl", '{"seconds": "fast"}\n' * 6, r"metrics\.jsonl is damaged: a step has 'fast'"),
        ("metrics.jsonl", '{"seconds": NaN}\n' * 6, r"metrics\.jsonl is damaged: a step has nan"),
        ("timeline.json", "{", r"timeline\.json is damaged: "),
        ("memory.json", '{"weights": 1}', r"memory\.json: it holds an object, and a list is due"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    """A line that is JSON and no figure went on to a TypeError."""
    root = write_run(tmp_path / "run", [1.0] * 6)
    (root / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        read_run(root)


def test_a_file_in_the_place_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; name the folder of a run"):
        read_run(tmp_path / "file")
