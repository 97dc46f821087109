"""A dry run says what a run would hold in memory, by the kinds that the run itself reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import mostly_exhaustive
from warm import warm_commands

from penstock.tools.train import dry_run
from penstock.tools.train.build import build_model
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.dry_run import make_plan

SMALL = [
    "model.options.layers=2",
    "model.options.width=64",
    "model.options.heads=2",
    "data.sequence=64",
    "data.batch=8",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "training.steps=4",
    "evaluation.every=0",
    "logging.tensorboard=off",
]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return [*SMALL, f"data.source={path}", f"output={tmp_path / 'run'}"]


def test_it_shows_the_plan_and_writes_nothing(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 300_000_000)  # a process of its own finds it out
    config = load_config(None, settings)
    check_consistent(config)
    plan = make_plan(config)
    shown = plan.text()
    for part in (
        "stage  rank",
        "0F0",
        "predicted idle share",
        "rank  weights  gradients  optimizer",
        "text.txt",
    ):
        assert part in shown
    assert plan.measured
    assert 0 < plan.timeline.bubble < 1
    bytes_of_model = sum(parameter.numel() for parameter in build_model(config)[0].parameters()) * 4
    assert sum(row.weights for row in plan.memory) == bytes_of_model
    assert sum(row.gradients for row in plan.memory) == bytes_of_model
    assert sum(row.optimizer for row in plan.memory) == 2 * bytes_of_model
    for row in plan.memory:
        copy = row.weights + row.optimizer  # of a checkpoint
        kinds = (row.weights, row.gradients, row.optimizer, copy, row.activations or 0)
        assert row.activations
        assert row.process == 300_000_000 + sum(kinds)
    assert not Path(config.output).exists()


def test_recomputing_keeps_less_and_shards_divide(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 0)
    plain = make_plan(load_config(None, settings)).memory
    less = make_plan(load_config(None, [*settings, "pipeline.recompute=always"])).memory
    assert sum(row.activations or 0 for row in less) < sum(row.activations or 0 for row in plain)
    shards = ["mesh.replicas=2", "mesh.replicate=fsdp"]
    half = make_plan(load_config(None, [*settings, *shards])).memory
    assert [row.weights for row in half] == [row.weights / 2 for row in plain]
    averaged = make_plan(load_config(None, [*settings, "training.ema=0.9"])).memory
    assert [row.optimizer for row in averaged] == [row.optimizer + row.weights for row in plain]
    spread = make_plan(load_config(None, [*settings, "mesh.tp=2"])).memory
    assert all(0.5 * full.weights < part.weights < 0.7 * full.weights for part, full in zip(spread, plain, strict=True))


def test_ranks_that_are_threads_are_one_row(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 0 if forked else 300_000_000)
    config = load_config(None, [*settings, "pipeline.workers=threads"])
    plan = make_plan(config)
    (row,) = plan.memory
    assert row.weights == sum(parameter.numel() for parameter in build_model(config)[0].parameters()) * 4
    assert row.activations
    kinds = (2 * row.weights, row.gradients, 2 * row.optimizer, row.activations)  # twice: a checkpoint's copy
    assert row.process == 300_000_000 + sum(kinds)
    assert plan.text().splitlines()[-1].split()[0] == "all"


def test_activations_are_those_of_the_step_that_the_run_counts(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were those of the first step, whose rows may be shorter; what is longer later is said."""
    monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 0)
    rows = tmp_path / "rows.jsonl"

    def plan(*lengths: int) -> dry_run.DryRun:
        """Of as many steps, each with rows of one length."""
        written = [{"input_ids": [1] * (length + 1)} for length in lengths for _ in range(8)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in written))
        return make_plan(load_config(None, [*settings, f"data.source={rows}", "data.shuffle=false"]))

    ragged, even = plan(4, 32, 8), plan(32, 32)
    assert [row.activations for row in ragged.memory] == [row.activations for row in even.memory]
    assert not ragged.notes
    (note,) = plan(8, 4).notes
    assert note.startswith("activations are of rows of 4 tokens")
    assert note.endswith("with rows of 8 there are more")


def test_divided_tensors_are_said_to_be_counted_whole() -> None:
    config = load_config(None, ["mesh.tp=2"])
    (note,) = dry_run.memory_notes(config, open_data(config), DataBatch((), {}, None, 0))
    assert note.startswith("activations are an upper bound: tensors inside layers are divided by mesh.tp, 2")


@pytest.mark.slow
def test_a_model_whose_weights_are_in_a_folder_is_measured_with_zeros(
    tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not read for that, so the pieces that are timed are those of the pipeline."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).save_pretrained(tmp_path / "llama")
    own = [each for each in settings if not each.startswith("model.")]
    plan = make_plan(load_config(None, [*own, f"model.source=huggingface:{tmp_path / 'llama'}"]))
    assert plan.measured
    assert all(row.activations for row in plan.memory)


RUNS = {
    "ema": ["training.ema=0.99"],
    "recompute": ["pipeline.recompute=always", "optimizer.name=sgd"],
    "except_last": ["pipeline.recompute=except_last", "pipeline.schedule=gpipe", "training.accumulate=2"],
    "zb-v": ["pipeline.schedule=zb-v", "model.options.layers=4"],
}


@pytest.mark.parametrize("name", mostly_exhaustive(RUNS, "ema", "except_last", "zb-v"))
def test_the_run_itself_reports_what_was_predicted(
    settings: list[str], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in new processes, whose memory before any tensor is predicted as well; the others only for what they add."""
    is_new = name == "ema"
    command = [sys.executable, "-m", "penstock"] if is_new else [warm_commands() / "penstock"]
    if not is_new:
        monkeypatch.setattr(dry_run, "process_bytes", lambda *_, forked: 0)
    settings = [*settings, *RUNS[name]]
    plan = make_plan(load_config(None, settings)).memory
    result = subprocess.run([*command, "train", *settings], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "CPUAllocator" not in result.stderr  # counting is not to be heard
    found = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert len(found) == len(plan) == 2
    for row, predicted in zip(found, plan, strict=True):
        assert row["weights"] == predicted.weights
        assert row["gradients"] == predicted.gradients
        assert row["optimizer"] == pytest.approx(predicted.optimizer, rel=0.01)
        assert row["activations"] == pytest.approx(predicted.activations, rel=0.1)
        if is_new:
            assert row["process"] == pytest.approx(predicted.process, rel=0.1)
