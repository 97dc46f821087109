"""`penstock eval`: the loss of a checkpoint in a few words, or as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_runs import TINY, config_of, trained
from typer.testing import CliRunner

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli import app
from penstock.tools.train.evaluate import evaluate_checkpoint


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return path


def test_the_newest_checkpoint_of_the_output_is_evaluated_or_the_one_that_is_named(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "training.steps=2", "checkpoint.every=1")
    assert trained(config) == 0
    newest = find_checkpoint(config.output)
    step, losses, loss = evaluate_checkpoint(config, newest, 2)
    settings = [*TINY, f"data.source={text}", f"output={config.output}"]

    def shown(*options: str) -> str:
        result = CliRunner().invoke(app, ["eval", *settings, "--batches", "2", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    first, second = shown().splitlines()
    assert first == f"{newest}, step {step}, {len(losses)} batches"
    assert second == f"loss {loss:.4f}  perplexity {math.exp(loss):.2f}  {loss / math.log(2):.3f} bits a token"
    facts = json.loads(shown("--json", "--checkpoint", str(newest.with_name("step-00000001"))))
    assert (facts["step"], facts["batches"]) == (1, 2)
    assert facts["bits_per_token"] == pytest.approx(facts["loss"] / math.log(2))
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))
    assert json.loads(shown("--json", "--checkpoint", "best"))["loss"] <= min(loss, facts["loss"]) + 1e-6


def test_a_run_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["eval", *TINY, "output=nowhere"])
    assert result.exit_code == 2
    assert "there is no" in result.output
