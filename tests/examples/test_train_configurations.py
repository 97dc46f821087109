"""The configurations in examples/train, as a new user runs them: made on the spot, nothing downloaded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm import warm_commands

from penstock.tools.train.run.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"


def run(folder: Path, program: str, *arguments: str) -> str:
    command = [str(warm_commands() / program), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path, *settings: str) -> list[float]:
    """Of a run in `folder`, which the last of the settings names as its output."""
    said = run(folder, "penstock", "train", *settings, "logging.tensorboard=off")
    assert "done: step" in said
    return [line["loss"] for line in read_metrics(folder / settings[-1].partition("=")[2] / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_learn_packed_chats_on_two_processes_as_in_one(tmp_path: Path) -> None:
    run(tmp_path, "python", str(EXAMPLES / "make_chats.py"))
    settings = [str(EXAMPLES / "chats.toml"), "training.steps=12", "evaluation.every=6"]
    two = losses(tmp_path, *settings, "output=two")
    one = losses(
        tmp_path, *settings, "pipeline.ranks=1", "pipeline.workers=threads", "training.accumulate=2", "output=one"
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert two[-1] < two[0] - 0.3  # adapters alone, on random weights


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_built_in_gpt_learns_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, "python", str(EXAMPLES / "make_tokenizer.py"))
    texts = Path(pytest.__file__).parent
    found = losses(
        tmp_path,
        str(EXAMPLES / "gpt_tokenizer.toml"),
        f"data.source={texts}/*.py",
        "pipeline.workers=threads",
        "model.options.layers=2",
        "training.steps=12",
        "optimizer.warmup=2",
        "evaluation.every=0",
        "output=run",
    )
    assert found[0] == pytest.approx(7.6, abs=0.1)  # of 2000 tokens, all alike
    assert found[-1] < found[0] - 1
