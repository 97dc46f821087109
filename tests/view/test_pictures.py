"""Terminal, SVG, PNG and trace: what they show is what the timeline says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from penstock.schedule import FAMILIES, Costs, Span, Timeline, build, parse, simulate
from penstock.schedule.timing.timeline import Wall
from penstock.view.figures import idle_shares, in_flight, time_text
from penstock.view.gantt import gantt
from penstock.view.perfetto import save_trace, trace
from penstock.view.png import save_png
from penstock.view.run import Run
from penstock.view.svg import save_svg, svg

CHART = """\
1f1b: 2 ranks, 2 stages, 3 microbatches, simulated
rank 0 F0-F1--·······B0=====F2-B1=====···B2=====  25.0 %
rank 1 ···F0--B0=====F1-B1=====F2-B2=====·······  25.0 %
       0                  6                   12    idle
makespan 12; idle 25.0 % (fill 4.2 %, wait 12.5 %, drain 8.3 %); at most 2 in flight on a rank
 F  forward   B  backward  """


def run(name: str, ranks: int = 4, microbatches: int = 6, **costs: float) -> Run:
    return Run(name, simulate(build(name, ranks, microbatches), Costs(**costs)))


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


def test_the_terminal_chart_is_this() -> None:
    assert gantt([run("1f1b", 2, 3)], 56).plain == CHART


@pytest.mark.parametrize("width", [24, 60, 80, 200])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_chart_is_as_wide_as_it_may_be(name: str, width: int) -> None:
    for line in gantt([run(name, microbatches=40)], width).plain.splitlines():
        if line.startswith("rank "):
            assert len(line) == width


def test_a_crowded_chart_shows_the_ops_and_no_names() -> None:
    rows = [line for line in gantt([run("gpipe", microbatches=1000)], 60).plain.splitlines() if line[:5] == "rank "]
    assert all(set(row[7:-8]) <= set("FB·") for row in rows)


def test_a_pair_shows_both_halves_where_they_fit_and_else_the_letter_of_the_legend() -> None:
    pair = parse("(0F1;1B0)OVERLAP_F_B")
    schedule = build("dualpipe-v", 1, 4)
    for length, shown in ((8.0, "F1B0###"), (3.0, "O##")):
        timeline = Timeline(schedule, (Span(0, pair, 0.0, length), Span(0, parse("0F3"), length, 40.0)), (2,))
        text = gantt([Run("run", timeline)], 55).plain
        assert f"rank 0 {shown}" in text
        assert " O  overlapped pair" in text


def test_charts_of_one_unit_share_their_scale() -> None:
    text = gantt([run("gpipe"), run("gpipe", forward=0.5, input=0.5, weight=0.5)], 80).plain
    rows = [line[7:-8] for line in text.splitlines() if line.startswith("rank 0")]
    assert 0 < len(rows[1].rstrip("·")) <= len(rows[0]) // 2 + 1


def test_idle_time_is_told_by_what_it_is_for() -> None:
    shares = idle_shares(simulate(build("gpipe", 3, 2)))
    assert [round(share.fill, 3) for share in shares] == [0, 0.083, 0.167]
    assert [round(share.drain, 3) for share in shares] == [0, 0.167, 0.333]
    assert [share.total for share in shares] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_in_flight_peaks_where_the_timeline_says(name: str) -> None:
    timeline = simulate(build(name, 4, 7), Costs(hop=0.1))
    for rank, peak in enumerate(timeline.peak_activations):
        curve = in_flight(timeline, rank)
        assert max(level for _, level in curve) == peak
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


def test_times_are_told_in_a_fitting_unit() -> None:
    assert [time_text(value, "s") for value in (0, 2.5, 0.0123456, 5e-6)] == ["0 s", "2.5 s", "12.35 ms", "5 us"]
    assert [time_text(value, "s") for value in (0.99999, 0.00099999)] == ["1 s", "1 ms"]
    assert time_text(3, "") == "3"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_svg_has_each_compute_once(name: str, tmp_path: Path) -> None:
    shown = run(name)
    save_svg([shown], tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    named = [title.partition(",")[0] for title in titles if "," in title]
    assert sorted(named) == sorted(str(span.action) for span in shown.timeline.spans)


def test_the_svg_escapes_what_it_is_given() -> None:
    root = ElementTree.fromstring(svg([Run('<b>&"', run("1f1b").timeline)]))
    assert root.attrib["aria-label"] == '<b>&"'


def test_the_png_shows_the_colours_where_the_svg_has_them(tmp_path: Path) -> None:
    shown = run("1f1b", 2, 2)
    save_png([shown], tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as opened:
        image = opened.convert("RGB")
    boxes = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="[\d.]+" fill="(#\w+)"><title>', svg([shown])
    )
    assert len(boxes) == 8
    for x, y, _, colour in boxes:
        assert image.getpixel((round(float(x) * 2) + 1, round(float(y) * 2) + 1)) == ImageColor.getrgb(colour)


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
