"""The loss of a checkpoint outside of training is that of the run, whatever the layout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_runs import TINY, config_of, trained
from typer.testing import CliRunner

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.cli import app
from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.evaluate import check_sizes, evaluate_checkpoint
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_as_its_run_did_and_in_another_layout(tmp_path: Path, text: Path) -> None:
    config = config_of(
        tmp_path, text, "training.steps=80", "optimizer.lr=0.02", "data.sequence=12", "checkpoint.every=0"
    )
    assert trained(config) == 0
    folder = RunFolder(Path(config.output))
    path = find_checkpoint(folder.root)
    assert path == find_checkpoint(folder.checkpoints) == find_checkpoint(path)
    step, losses, mean = evaluate_checkpoint(config, path, 2)
    assert (step, len(losses)) == (80, 2)
    assert mean == read_metrics(folder.metrics)[-1]["validation"] == pytest.approx(sum(losses) / 2)
    settings = [*TINY, f"data.source={text}", "data.sequence=12", "pipeline.ranks=1"]
    wide = load_config(None, settings)
    assert evaluate_checkpoint(wide, path, 2)[1] == pytest.approx(losses, rel=1e-5)  # another layout
    options = ["--checkpoint", str(path), "--batches", "2", "--json"]
    facts = json.loads(CliRunner().invoke(app, ["eval", *settings, *options]).stdout)
    assert facts["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert facts["bits_per_token"] == pytest.approx(facts["loss"] / math.log(2))
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))


def test_without_validation_data_nothing_is_evaluated(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "data.validation=0", "training.steps=1")
    assert trained(config) == 0
    with pytest.raises(UsageError, match="no validation data"):
        evaluate_checkpoint(config, find_checkpoint(config.output), 2)


def test_a_configuration_of_another_size_is_refused_with_both_sizes(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "training.steps=1", "evaluation.every=0")
    assert trained(config) == 0
    contents = CheckpointContents(find_checkpoint(config.output))
    check_sizes(config, contents)
    other = config_of(tmp_path, text, "model.options.layers=3", "model.options.width=32")
    with pytest.raises(UsageError, match=r"layers is 3, not 2; model\.options\.width is 32, not 16"):
        check_sizes(other, contents)
