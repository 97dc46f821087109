"""A number that is none ends a run or a step, and the module that made it is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tiny_runs import config_of, trained

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.updates.nonfinite import NonFinite


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("forward", r"step 3: the loss is nan. First bad: stage 1: 2 \(Poisoned\), whose output has NaN"),
        ("backward", r"step 3: the loss is .*, the norm of the gradients nan.*stage 1: the backward of 2.inner"),
    ],
)
def test_a_bad_number_stops_the_run_and_the_module_is_named(
    tmp_path: Path, text: Path, mine: list[str], where: str, words: str
) -> None:
    config = config_of(tmp_path, text, *mine, f"model.options={{after=8, where='{where}'}}", "checkpoint.every=2")
    with pytest.raises(NonFinite, match=words):
        trained(config)
    folder = RunFolder(Path(config.output))
    assert find_checkpoint(folder.root).name == "step-00000002"
    assert len(read_metrics(folder.metrics)) == 2


def test_weights_that_begin_bad_are_named_and_no_setting_is_advised(
    tmp_path: Path, text: Path, mine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower rate was advised where the folder's own weights held NaN."""
    config = config_of(tmp_path, text, *mine, "model.source=my_run:bad_from_the_start")
    words = (
        r"stage 1: the parameter 1.bias was already NaN before the step\. The model begins with it: .*from_the_start$"
    )
    with pytest.raises(NonFinite, match=words):
        trained(config)
    monkeypatch.setattr("penstock.tools.train.steps.is_pretrained", lambda _: True)
    with pytest.raises(NonFinite, match=r"The weights in .* hold it, before any training; write that folder again"):
        trained(config)


def test_a_bad_step_is_left_out_by_option_and_too_many_end_the_run(tmp_path: Path, text: Path, mine: list[str]) -> None:
    once = [*mine, "training.nonfinite=skip", "model.options={after=8, only=4}"]
    config = config_of(tmp_path, text, *once)
    assert trained(config) == 0
    lines = read_metrics(RunFolder(Path(config.output)).metrics)
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert lines[2]["loss"] == "nan"
    assert all(math.isfinite(line["loss"]) for line in lines[3:])
    always = config_of(tmp_path, text, *mine, "training.nonfinite=skip", "training.most_skips=2")
    with pytest.raises(NonFinite, match="in 3 steps in a row"):
        trained(always)
