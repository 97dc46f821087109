"""The file of a run's figures: what is damaged in it is counted, and where it has gone is seen at once."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.tools.train.run.metrics import Metrics, read_metrics


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They were left out without a word: a curve with holes, and a run of fewer steps than it had."""
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1}\n{"step": 2}\n'
    path.write_text(good + '{"step": 3')  # a kill cut the last one short
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert not caplog.messages
    path.write_bytes(good.encode() + b'\xff\n[1]\n{"step": true}\n{"st' + b"[" * 5000 + b'\n{"step": 7}\n')
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(path)] == [1, 2, 7]
    assert caplog.messages == [f"{path}: 4 of 7 lines are damaged, and left out"]


@pytest.mark.parametrize("value", ["null", "true", "{}", '["x"]', "[[1]]", "9" * 400, "[null]"])
def test_what_is_no_figure_is_damage(value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A text in the place of a speed was a TypeError once the run had trained on and drew its page."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"step": 1, "loss": 2.5, "memory": [7]}}\n{{"step": 2, "loss": {value}}}\n{{"step": 3, "loss": "nan"}}\n'
    )
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert caplog.messages == [f"{path}: 1 of 3 lines are damaged, and left out"]


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_file_that_has_gone_while_it_is_written_is_named(how: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = Metrics(path, 0)
    metrics.write(1, loss=2.0)
    if how == "removed":
        shutil.rmtree(path.parent)
    else:
        path.rename(tmp_path / "elsewhere")
    if how == "replaced":
        path.write_text("")
    with pytest.raises(UsageError, match=r"run/metrics\.jsonl was removed, moved or replaced while the run wrote"):
        metrics.write(2, loss=1.0)
    metrics.close()


def test_metrics_are_json_lines_without_nan(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", 0)
    metrics.write(1, loss=math.nan, norm=math.inf, extra=None)
    metrics.write(2, loss=0.1)
    metrics.close()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": "nan", "norm": "inf"}, {"step": 2, "loss": 0.1}]
    Metrics(tmp_path / "m.jsonl", 1).close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1]
    Metrics(tmp_path / "m.jsonl", 0).close()
    assert read_metrics(tmp_path / "m.jsonl") == []
