"""`penstock train` on devices, in processes that it starts: it uses them unasked, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator.harness import require_device

TESTS = Path(__file__).resolve().parents[1]
DEVICE = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom accelerator import pretend\n"  # before torch, in each
TINY = [
    *("model.options.layers=2", "model.options.width=16", "model.options.heads=2", "model.options.dropout=0.1"),
    *("data.sequence=16", "data.batch=8", "pipeline.ranks=2", "pipeline.microbatches=4", "pipeline.schedule=1f1b"),
    *("pipeline.device=auto", "pipeline.workers=processes", "optimizer.warmup=1", "optimizer.decay=constant"),
    *("evaluation.every=2", "evaluation.batches=2", "checkpoint.every=2", "logging.every=1", "logging.tensorboard=off"),
]


def train(folder: Path, name: str, *more: str) -> tuple[list[float], str]:
    """Run the command; returns the losses so far, and what it has written."""
    (folder / "sitecustomize.py").write_text(DEVICE)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    settings = [*TINY, f"data.source={folder / 'text.txt'}", f"output={folder / name}", *more]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", *settings],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PRETEND_NAME": "pretend"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_is_resumed_on_devices_has_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    require_device()
    whole, said = train(tmp_path, "whole", "training.steps=4")
    assert "pretend" in said
    train(tmp_path, "parts", "training.steps=2")
    resumed, _ = train(tmp_path, "parts", "training.steps=4", "--resume")
    assert len(whole) == 4
    assert resumed == whole
