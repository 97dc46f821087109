"""When a run ends by itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import Evaluation
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.loop import EarlyStopping
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here


def seen(stopping: EarlyStopping, losses: list[float]) -> list[tuple[bool, bool]]:
    return [(stopping.see(step, loss), stopping.over) for step, loss in enumerate(losses, start=1)]


def test_it_waits_for_a_loss_that_is_lower_by_enough() -> None:
    stopping = EarlyStopping(Evaluation(patience=2, min_delta=0.1))
    lowest, over = zip(*seen(stopping, [3.0, 2.95, 2.85, 2.84, math.nan, 2.8]), strict=True)
    assert lowest == (True, True, True, True, False, True)
    assert over == (False, False, False, False, True, True)  # 2.85 beats 3.0 by enough, 2.84 and NaN do not beat 2.85
    assert (stopping.lowest, stopping.lowest_step) == (2.8, 6)
    assert (
        "3 evaluations without a validation loss by 0.1 below 2.8500; the lowest is 2.8000, of step 6" in stopping.words
    )
    patient = EarlyStopping(Evaluation())
    assert not any(over for _, over in seen(patient, [1.0, 2.0, 3.0, 4.0]))


def test_it_goes_on_where_it_was() -> None:
    losses = [3.0, 2.0, 2.5, 2.4, 2.3]
    straight = EarlyStopping(Evaluation(patience=3))
    wanted = seen(straight, losses)
    parted, resumed = (EarlyStopping(Evaluation(patience=3)) for _ in range(2))
    seen(parted, losses[:3])
    resumed.load_state_dict(parted.state_dict())
    assert [(resumed.see(step, losses[step - 1]), resumed.over) for step in (4, 5)] == wanted[3:]
    assert resumed.over
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.slow
def test_a_run_ends_early_and_its_best_weights_are_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No loss is lower by 100, so two evaluations after the first end the run; more patience lets it go on."""
    text = tmp_path / "text.txt"
    text.write_text("the weights are what they were\n" * 100)
    settings = [
        f"data.source={text}",
        f"output={tmp_path / 'run'}",
        *("model.options.layers=2", "model.options.width=16", "data.sequence=16", "data.batch=8"),
        *("pipeline.ranks=2", "pipeline.microbatches=4", "pipeline.workers=threads", "logging.tensorboard=off"),
        *("training.steps=20", "training.ema=0.5", "optimizer.warmup=0", "checkpoint.every=0"),
        *("evaluation.every=2", "evaluation.min_delta=100"),
    ]

    def trained(*more: str) -> tuple[int, int, str]:
        config = load_config(None, [*settings, *more])
        folder = RunFolder(Path(config.output))
        folder.prepare(config, resume=folder.metrics.exists(), fresh=False).free()
        code = train_here(Job(config, ""), Stop())
        return code, len(read_metrics(folder.metrics)), capsys.readouterr().out

    code, steps, told = trained("evaluation.patience=2")
    assert (code, steps) == (0, 6)
    assert "ended early: 2 evaluations without a validation loss by 100 below" in told
    assert trained("evaluation.patience=2")[:2] == (0, 6)  # nothing left to do
    assert trained("evaluation.patience=3")[:2] == (0, 8)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    lowest = min((line["validation"], line["step"]) for line in lines if "validation" in line)
    found = {
        way: json.loads(
            CliRunner().invoke(app, ["eval", *settings, "--checkpoint", "best", "--batches", "4", way, "--json"]).stdout
        )
        for way in ("--ema", "--no-ema")
    }
    assert (found["--ema"]["loss"], found["--ema"]["step"]) == lowest
    assert found["--no-ema"]["loss"] != lowest[0]
