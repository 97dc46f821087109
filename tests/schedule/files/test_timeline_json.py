"""Timelines as files: the same value comes back, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import FAMILIES, Costs, Schedule, Span, Timeline, build, parse, simulate
from penstock.schedule.files.timeline_json import from_json, is_timeline, to_json
from penstock.schedule.timing.timeline import Wall

SCHEDULE = Schedule.from_text(["0F0 0B0", "1F0 1B0"])
MEASURED = Timeline(
    SCHEDULE,
    (
        Span(0, parse("0F0"), 10.0, 11.0),
        Span(0, parse("0B0"), 14.5, 15.5, 3.0),
        Span(1, parse("1F0"), 11.5, 12.5, 1.5),
        Span(1, parse("1B0"), 12.5, 14.0),
    ),
    peak_activations=(1, 1),
    chores=(Span(0, parse("0SEND_F0"), 11.0, 11.25), Span(1, parse("1SEND_B0"), 14.0, 14.25)),
    walls=(Wall(9.0, 15.5, 16.0, 0.5), Wall(9.0, 14.25, 16.0, 0.5)),
    unit="s",
    cores=2,
)


def test_a_measured_timeline_comes_back_as_it_was(tmp_path: Path) -> None:
    MEASURED.save(tmp_path / "run.json")
    loaded = Timeline.load(tmp_path / "run.json")
    assert loaded == MEASURED
    assert loaded.measured
    assert loaded.critical_path == MEASURED.critical_path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_simulated_timeline_comes_back_with_its_critical_path(name: str) -> None:
    timeline = simulate(build(name, 3, 5), Costs(forward=1, input=1.5, weight=0.7, hop=0.1))
    loaded = from_json(to_json(timeline))
    assert loaded == timeline
    assert not loaded.measured
    assert [span.end for span in loaded.critical_path][-1] == timeline.makespan


def test_a_timeline_is_told_from_a_schedule() -> None:
    from penstock.schedule.files.text import to_json as schedule_json

    assert is_timeline(to_json(MEASURED))
    assert not is_timeline(schedule_json(SCHEDULE))


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(MEASURED)) | changes)


WRONG = {
    "": "not JSON",
    "[]": '"penstock_timeline": 1 at its top',
    changed(penstock_timeline=2): '"penstock_timeline": 1 at its top',
    changed(spans=None): "'spans' is missing or wrong",
    changed(cores=-1): "cores is not a number of cores: -1",
    changed(cores="many"): "cores is not a number of cores: many",
    changed(schedule={}): '"penstock_schedule": 1 at its top',
    changed(spans=[[0, "0F0", 1, 2]]): r"spans\[0\] is not \[rank, action, start, end, wait\]",
    changed(spans=[[0, "0X0", 1, 2, 0]]): r"spans\[0\]: '0X0' is not an action",
    changed(spans=[[0, "0F0", 2, 1, 0]]): "2 to 1 after 0 is not a span",
    changed(spans=[[0, "0F0", 1, float("inf"), 0]]): "is not a span",
    changed(spans=[[0, "0F0", 1, 2, -1]]): "is not a span",
    changed(spans=[[0, "0F0", 1, 10**400, 0]]): "is not a span",
    changed(clock_error=10**400): "clock_error is not a time",
    changed(spans=[[0, "0F0", True, 2, 0]]): "is not a span",
    changed(spans=[[7, "0F0", 1, 2, 0]]): "there is no rank 7",
    changed(spans=[[True, "0F0", 1, 2, 0]]): "there is no rank True",
    changed(spans=[[1, "0F0", 1, 2, 0]]): "rank 1 does not own that stage",
    changed(spans=[[0, "5F0", 1, 2, 0]]): "rank 0 does not own that stage",
    changed(spans=[[0, "0F0", 3, 4, 0], [0, "0B0", 1, 2, 0]]): "starts before the span of rank 0",
    changed(walls=[[1, 2, 3, 0]]): "one entry for each of 2 ranks",
    changed(walls=[[3, 2, 1, 0], [1, 2, 3, 0]]): r"walls\[0\] is not \[start, end, done, optimizer\] in order",
    changed(peak_activations=[1]): "one number for each of 2 ranks",
}


@pytest.mark.parametrize("text", WRONG, ids=list(WRONG.values()))
def test_what_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=WRONG[text]):
        from_json(text)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ScheduleError) as caught:
        from_json(changed(spans=[[9, "0F0", 1, 2, 0], [0, "0F0", 2, 1, 0]], walls=[[]]))
    assert len(caught.value.faults) == 4


def test_a_long_list_of_faults_is_cut() -> None:
    with pytest.raises(ScheduleError, match="and 80 more"):
        from_json(changed(spans=[[9, "0F0", 1, 2, 0]] * 100))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="not text in UTF-8"):
        Timeline.load(tmp_path / "run.json")


def test_a_measured_wait_on_a_slow_link_is_on_the_critical_path() -> None:
    """0F0 ended at 11, before rank 1's own work did, but what it made arrived at 20: rank 1 waited for that."""
    schedule = Schedule.from_text(["0F0 0F1", "1F0 1F1"])
    spans = (
        Span(0, parse("0F0"), 0.0, 1.0),
        Span(0, parse("0F1"), 1.0, 2.0),
        Span(1, parse("1F0"), 2.0, 10.0, 1.0),
        Span(1, parse("1F1"), 20.0, 21.0, 10.0),
    )
    walls = (Wall(0.0, 2.0, 21.0), Wall(0.0, 21.0, 21.0))
    timeline = Timeline(schedule, spans, walls=walls, unit="s")
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "0F1", "1F1"]
    hasty = replace(timeline, spans=(*spans[:3], Span(1, parse("1F1"), 10.1, 11.1, 0.1)))
    assert [str(span.action) for span in hasty.critical_path] == ["0F0", "1F0", "1F1"]
