"""A run goes on where its newest whole checkpoint is, under the configuration that it is given now."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import config_of, losses, trained

from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.resume import changed_since
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder


@pytest.mark.slow
def test_steps_that_are_done_again_are_in_the_metrics_once(tmp_path: Path, text: Path) -> None:
    """As after a kill: step 8 was trained and written down, and the newest checkpoint is of step 6."""
    config = config_of(tmp_path, text)
    assert trained(config) == 0
    wanted = losses(config)
    folder = RunFolder(Path(config.output))
    (folder.checkpoints / "step-00000008" / "manifest.json").unlink()
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "lo')
    assert trained(config, resume=True) == 0
    assert losses(config) == wanted


@pytest.mark.slow
def test_a_resumed_run_names_the_checkpoint_that_it_has_loaded(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named the newest one, though that was damaged and an older one was loaded."""
    config = config_of(tmp_path, text, "training.steps=4", "evaluation.every=0", "checkpoint.every=2")
    assert trained(config) == 0
    folder = RunFolder(Path(config.output))
    (folder.checkpoints / "step-00000004" / "index.json").write_text("{}")
    capsys.readouterr()
    assert trained(config, resume=True) == 0
    assert f"resuming from step 2: {folder.checkpoints / 'step-00000002'}\n" in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_go_on_with(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, text, "training.steps=2")
    assert trained(config) == 0
    assert trained(config, resume=True) == 0
    assert "step 2, nothing left to do" in capsys.readouterr().out
    assert len(losses(config)) == 2


@pytest.mark.slow
def test_another_layout_goes_on_where_this_one_was(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "model.options.layers=4", "training.steps=6", "evaluation.every=0")
    assert trained(config) == 0
    wanted = losses(config)
    other = config_of(
        tmp_path,
        text,
        "model.options.layers=4",
        "training.steps=6",
        "evaluation.every=0",
        f"output={tmp_path / 'other'}",
        "pipeline.ranks=1",
        "pipeline.stages=1",
        "checkpoint.every=3",
    )
    RunFolder(Path(other.output)).prepare(other, resume=False, fresh=True).free()
    source = RunFolder(Path(config.output)).checkpoints / "step-00000003"
    source.rename(RunFolder(Path(other.output)).checkpoints / source.name)
    assert trained(other, resume=True) == 0
    again = [line["loss"] for line in read_metrics(RunFolder(Path(other.output)).metrics)]
    assert again == pytest.approx(wanted[3:], rel=1e-4)


def test_a_resume_follows_the_configuration_that_it_is_given(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steady = ["optimizer.warmup=0", "optimizer.decay=constant", "evaluation.every=0"]
    config = config_of(tmp_path, text, *steady, "training.steps=2")
    assert trained(config) == 0
    assert trained(config_of(tmp_path, text, *steady, "training.steps=3", "optimizer.lr=1e-5"), resume=True) == 0
    told = capfd.readouterr().out
    assert "note: changed since that checkpoint: optimizer.lr 0.003 -> 1e-05, training.steps 2 -> 3" in told
    assert [line["lr"] for line in read_metrics(RunFolder(Path(config.output)).metrics)] == [0.003, 0.003, 1e-5]


def test_what_does_not_fit_a_checkpoint_is_named_by_its_key(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert changed_since(folder, TrainConfig()) == []
    folder.keep_config(load_config(None, ["lora.rank=8"]))
    assert changed_since(folder, load_config(None, ["lora.rank=16"])) == ["lora.rank 8 -> 16"]
    assert changed_since(folder, load_config(None, [])) == ["lora.rank 8 -> 0"]
