"""A run beside its prediction: figures by name, and the schedule and the cut that the run had."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.planner.cluster import Cluster, Device, Interconnect
from penstock.planner.comparison import compare_run, comparison_document, comparison_text
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.writing import write_plan
from penstock.schedule import Costs, build, simulate
from penstock.tools.train.config.read import load_config, to_document
from penstock.tools.train.config.settings import TrainConfig

TWO = Cluster(
    hosts=1,
    devices=2,
    device=Device(memory=1e9, peak=1e11, efficiency=0.4, bandwidth=1e10, reserved=1e8),
    inside=Interconnect(bandwidth=5e9, latency=5e-5),
)


def write_run(root: Path, config: TrainConfig, seconds: float = 0.05) -> Path:
    """A folder as a run leaves it."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(to_document(config)))
    (root / "metrics.jsonl").write_text(6 * (json.dumps({"seconds": seconds}) + "\n"))
    kinds = {"weights": 1e5, "gradients": 1e5, "optimizer": 2e5, "activations": 3e5, "tensors": 6e5, "process": 3e8}
    (root / "memory.json").write_text(json.dumps([kinds, kinds]))
    return root


def config(**pipeline: object) -> TrainConfig:
    found = config_for("gpt", batch=8, sequence=16, options={"layers": 4, "width": 32, "heads": 4})
    return replace(found, pipeline=replace(found.pipeline, ranks=2, microbatches=4, **pipeline))


def test_a_run_is_shown_beside_its_prediction_and_planned_again(tmp_path: Path) -> None:
    found = compare_run(write_run(tmp_path / "run", config()), TWO)
    assert found.measured["step"] == 0.05
    assert set(found.errors) == {"step", "weights", "gradients", "optimizer", "activations", "tensors"}
    text = comparison_text(found)
    assert "furthest off: " in text
    assert "next best: " in text
    assert comparison_document(found)["measured"] == found.measured


def test_without_a_cluster_the_run_calibrates_itself_and_the_process_is_compared(tmp_path: Path) -> None:
    found = compare_run(write_run(tmp_path / "run", config()))
    assert found.errors["step"] == pytest.approx(0, abs=1e-2)
    assert "process" in found.errors
    assert "whose error says nothing" in comparison_text(found)


def test_a_run_of_a_saved_plan_is_compared_with_what_the_plan_said(tmp_path: Path) -> None:
    """It was priced anew, at the efficiency that makes its own step right: the plan's own error was nowhere."""
    plan = penstock.plan(config(), TWO, layout=MeshLayout(2), schedules=["1f1b"]).best
    write_plan(plan, tmp_path / "plan.toml")
    root = write_run(tmp_path / "run", load_config(tmp_path / "plan.toml", ["training.steps=7"]), 2 * plan.seconds)
    timeline = replace(simulate(plan.schedule, Costs()), unit="s")
    timeline.save(root / "timeline.json")
    found = compare_run(root)
    assert found.errors["step"] == pytest.approx(-0.5)
    assert found.predicted["makespan"] < plan.seconds
    assert found.measured["makespan"] == timeline.makespan
    assert {"idle", "tensors", "process"} <= set(found.errors)
    assert "predicted when it was planned\n" in comparison_text(found)


@pytest.mark.slow
def test_a_plan_that_was_changed_before_it_ran_is_not_held_to_its_prediction(tmp_path: Path) -> None:
    plan = penstock.plan(config(), TWO, layout=MeshLayout(2), schedules=["1f1b"]).best
    write_plan(plan, tmp_path / "plan.toml")
    changed = load_config(tmp_path / "plan.toml", ["data.batch=32"])
    found = compare_run(write_run(tmp_path / "run", changed))
    assert "the prediction that was saved is not of this configuration" in comparison_text(found)
    assert found.errors["step"] == pytest.approx(0, abs=1e-2)


def test_the_mfu_of_plans_from_a_run_is_of_the_peak_that_the_run_had(tmp_path: Path) -> None:
    """The peak was measured anew and multiplied by four, so the run's own MFU of 40 % became one of some percent."""
    root = write_run(tmp_path / "run", config(), 0.05)
    (root / "metrics.jsonl").write_text(6 * (json.dumps({"seconds": 0.05, "mfu": 0.4}) + "\n"))
    assert compare_run(root).plan.mfu == pytest.approx(0.4, rel=1e-2)


def test_a_schedule_from_a_file_is_priced_as_it_is_written_there(tmp_path: Path) -> None:
    """It was priced by its name, which is no family's: a searched plan ended in a KeyError when its run was checked."""
    schedule = build("zb-v", 2, 4)
    path = tmp_path / "plan.schedule.json"
    schedule.replace(name="auto").save(path)
    named, from_file = (
        compare_run(write_run(tmp_path / name, config(schedule=what, stages=4)), TWO).predicted["step"]
        for name, what in (("one", "zb-v"), ("other", str(path)))
    )
    assert from_file == pytest.approx(named, rel=1e-9)


def test_the_cut_that_a_run_measured_for_itself_is_the_one_that_is_priced(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", config(balance="time", stages=2))
    (root / "cut.json").write_text(json.dumps({"stages": 2, "counts": [5, 1]}))
    assert compare_run(root, TWO).plan.counts == (5, 1)
