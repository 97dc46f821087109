"""A checkpoint becomes a model that writes, or it is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import config_of, trained
from torch import nn
from typer.testing import CliRunner

import penstock
from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli import app
from penstock.errors import UsageError
from penstock.tools.train.generation.continuing import Sampling
from penstock.tools.train.generation.opening import open_writer


def test_what_cannot_be_sampled_is_refused(tmp_path: Path, text: Path, mine: list[str]) -> None:
    config = config_of(tmp_path, text, *mine, "training.steps=1", "model.options={after=99}")
    assert trained(config) == 0
    path = find_checkpoint(config.output)
    with pytest.raises(UsageError, match="is of my_run:poisoned; text can be sampled from the built-in GPT"):
        open_writer(path)
    with pytest.raises(UsageError, match="there is no"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_checkpoint_of_a_users_own_loop_has_no_configuration_to_build_a_model_from(tmp_path: Path) -> None:
    plain = penstock.Pipeline(nn.Sequential(nn.Linear(2, 2)), stages=1, microbatches=1, loss_fn=nn.functional.mse_loss)
    with penstock.Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, plain)
    with pytest.raises(UsageError, match="not saved by penstock train"):
        open_writer(find_checkpoint(tmp_path / "own"))


@pytest.mark.slow
def test_what_is_written_follows_the_weights_the_seed_and_the_prompts(tmp_path: Path, text: Path) -> None:
    settings = ["training.steps=80", "optimizer.lr=0.02", "data.sequence=12", "checkpoint.every=0"]
    config = config_of(tmp_path, text, *settings, "evaluation.every=0")
    assert trained(config) == 0
    path = find_checkpoint(config.output)
    writer, sampling = open_writer(path), Sampling(temperature=0.7, top_k=5, seed=1)

    def written(how: Sampling) -> bytes:
        return bytes(token for _, token in writer.continue_rows([list(b"the ")], 40, how))

    assert len(written(sampling)) == 40
    assert set(written(sampling)) <= set(b"the quick brown fox jumps over the lazy dog; \n")  # it knows its letters
    assert written(sampling) == written(sampling)
    assert written(sampling) != written(replace(sampling, seed=2))
    several = ["generate", str(path), "--prompt", "the ", "--prompt", "dog", "--greedy", "--tokens", "9", "--json"]
    assert [len(each["text"]) for each in json.loads(CliRunner().invoke(app, several).stdout)] == [9, 9]
