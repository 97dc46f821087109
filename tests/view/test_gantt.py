"""The Gantt chart for a terminal: what it shows is what the timeline says."""

from __future__ import annotations

import pytest
from tiers import by_turns

from penstock.schedule import FAMILIES, Span, Timeline, build, parse
from penstock.view.gantt import gantt
from penstock.view.run import Run
from tests.view.simulated import run

CHART = """\
1f1b: 2 ranks, 2 stages, 3 microbatches, simulated
rank 0 F0-F1--·······B0=====F2-B1=====···B2=====  25.0 %
rank 1 ···F0--B0=====F1-B1=====F2-B2=====·······  25.0 %
       0                  6                   12    idle
makespan 12; idle 25.0 % (fill 4.2 %, wait 12.5 %, drain 8.3 %); a rank holds at most 2 whole-rank microbatches
 F  forward   B  backward  """


def test_the_terminal_chart_is_this() -> None:
    assert gantt([run("1f1b", 2, 3)], 56).plain == CHART


@pytest.mark.parametrize(
    ("name", "width"), by_turns(FAMILIES, [18, 24, 60, 80, 200], fast=[("1f1b", 18), ("zb-v", 80), ("v-min", 200)])
)
def test_a_chart_is_as_wide_as_it_may_be(name: str, width: int) -> None:
    rows = [line for line in gantt([run(name, microbatches=40)], width).plain.splitlines() if line[:5] != "idle "]
    ranks = [line for line in rows if line.startswith("rank " if width >= 40 else ("0 ", "1 ", "2 ", "3 "))]
    assert [len(line) for line in ranks] == [width] * 4


def test_a_narrow_legend_has_whole_entries_in_each_line() -> None:
    lines = gantt([run("zb-h1")], 30).plain.splitlines()[-3:]
    assert [line.rstrip() for line in lines] == [
        " F  forward",
        " I  backward for the inputs",
        " W  backward for the weights",
    ]


def test_memory_is_counted_in_microbatches_of_a_whole_rank() -> None:
    """Half-size stages are not counted as whole ones: zb-v holds what 1f1b does."""
    whole, halves = gantt([run("1f1b")], 200).plain, gantt([run("zb-v")], 200).plain
    assert "a rank holds at most 4 whole-rank microbatches" in whole
    assert "a rank holds at most 4 whole-rank microbatches" in halves
    assert (
        "a rank holds at most 6 GB" in gantt([run("zb-v")._replace(activation=(1.5e9, 0.5e9, 0.5e9, 0.5e9))], 200).plain
    )


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
