"""A trace for Perfetto: what its viewers take, and what the timeline says."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import FAMILIES, Span, Timeline, build, parse
from penstock.schedule.timing.timeline import Wall
from penstock.view.perfetto import save_trace, trace
from penstock.view.run import Run
from tests.view.simulated import run


def measured() -> Run:
    schedule = build("1f1b", 2, 1)
    spans = (
        Span(0, parse("0F0"), 5.0, 6.0),
        Span(0, parse("0B0"), 9.0, 10.0, 2.5),
        Span(1, parse("1F0"), 6.5, 7.0, 1.5),
        Span(1, parse("1B0"), 7.0, 8.5),
    )
    chores = (Span(0, parse("0SEND_F0"), 6.0, 6.25), Span(1, parse("1SEND_B0"), 8.5, 8.75))
    walls = (Wall(4.0, 10.0, 10.5), Wall(4.0, 8.75, 10.5))
    return Run("run", Timeline(schedule, spans, (1, 1), chores=chores, walls=walls, unit="s"))


@pytest.mark.parametrize(
    "shown", [*(run(name, hop=0.2) for name in FAMILIES), measured()], ids=lambda shown: shown.label
)
def test_a_trace_is_what_its_viewers_take(shown: Run) -> None:
    events = json.loads(json.dumps(trace([shown, shown])))["traceEvents"]
    slices: dict[Any, list[Any]] = defaultdict(list)
    flows: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for row in slices.values():
        row.sort(key=lambda event: event["ts"])
        for one, two in pairwise(row):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6  # nothing overlaps on a rank
    crossing = [
        maker for span in shown.timeline.spans for _, maker in shown.timeline.needed_by(span) if maker.rank != span.rank
    ]
    assert len(flows) == 2 * len(crossing)
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] < finish["ts"]
        for end in (start, finish):
            around = [s for s in slices[end["pid"], end["tid"]] if s["ts"] <= end["ts"] <= s["ts"] + s["dur"]]
            assert around


def test_every_compute_is_in_the_compute_category() -> None:
    """torch's own trace files I and overlapped pairs under communication."""
    pair = parse("(0F1;0B0)OVERLAP_F_B")
    shown = run("zb-v", 2, 2).timeline
    extra = Timeline(shown.schedule, (Span(0, pair, 0.0, 1.0),))
    for timeline in (shown, extra):
        events = trace([Run("x", timeline)])["traceEvents"]
        computes = [event["name"] for event in events if event.get("cat") == "compute"]
        assert sorted(computes) == sorted(str(span.action) for span in timeline.spans)
    assert {event["cat"] for event in trace([measured()])["traceEvents"] if "cat" in event} == {
        "compute",
        "communication",
        "wait",
    }


def test_arrows_leave_from_the_send_where_it_was_measured(tmp_path: Path) -> None:
    save_trace([measured()], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    send = next(event for event in events if event["name"] == "0SEND_F0")
    start = next(event for event in events if event["ph"] == "s" and event["name"] == "0F0 to 1F0")
    assert send["ts"] <= start["ts"] <= send["ts"] + send["dur"]
    assert send["cat"] == "communication"


def test_what_a_rank_holds_is_counted_in_whole_rank_microbatches() -> None:
    for name in ("1f1b", "zb-v"):
        events = [event for event in trace([run(name)])["traceEvents"] if event["ph"] == "C" and event["tid"] == 0]
        assert max(event["args"]["whole-rank microbatches"] for event in events) == 4, name
