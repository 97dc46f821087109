"""What a run shows of itself while it trains."""

from __future__ import annotations

import math
import sys

import pytest

from penstock.tools.train.run.progress import Pace, Progress, StepFigures, of_time


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reading = StepFigures(2, 30, 1.5, 1e-3, 0.25, 1234.5, 5_000_000, 0.25, 65.0)
    progress = Progress(sys.stdout, 2)
    for step in range(1, 5):
        progress.show(StepFigures(**{**reading.__dict__, "step": step}))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/30", "4/30"]
    assert lines[0] == (
        "step  2/30  loss 1.5000  lr 1.00e-03  norm 0.25  1,234 tokens/s  memory 5 MB  idle 25 %  eta 1:05"
    )
    Progress(None, 1).show(reading)
    assert capsys.readouterr().out == ""


def test_time_is_said_as_people_do() -> None:
    assert [of_time(s) for s in (5, 65, 3661, 90061, math.inf)] == ["0:05", "1:05", "1:01:01", "1 d 1:01:01", "-"]
    pace = Pace()
    pace.step(100)
    assert pace.rate > 0
    assert pace.left(0) == 0
