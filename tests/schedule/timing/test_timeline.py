"""What follows from the spans of a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.schedule import FAMILIES, Costs, Schedule, Span, Timeline, build, parse, simulate
from penstock.schedule.timing.timeline import peaks

SCHEDULE = build("1f1b", 2, 2)


def test_a_measured_timeline_need_not_start_at_zero() -> None:
    schedule = Schedule.from_text(["0F0", "1F0"])
    spans = (Span(0, parse("0F0"), 10, 12), Span(1, parse("1F0"), 13, 14, wait=1))
    timeline = Timeline(schedule, spans)
    assert (timeline.start, timeline.makespan) == (10, 4)
    assert timeline.busy == (2.0, 1.0)
    assert timeline.idle == (0.5, 0.75)
    assert timeline.bubble == pytest.approx(5 / 8)
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "1F0"]
    assert spans[0].length == 2


def test_without_spans_there_is_nothing() -> None:
    timeline = Timeline(SCHEDULE, ())
    assert (timeline.makespan, timeline.bubble, timeline.idle, timeline.critical_path) == (0, 0, (0, 0), ())


def test_shares_add_up() -> None:
    for name in FAMILIES:
        timeline = simulate(build(name, 3, 5), Costs(forward=1, input=1.5, weight=0.7, hop=0.1))
        assert timeline.bubble == pytest.approx(sum(timeline.idle) / 3)
        assert 0 <= timeline.bubble < 1
        for row in timeline.by_rank:
            assert all(one.end + two.wait == pytest.approx(two.start) for one, two in pairwise(row))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_critical_path_is_a_chain_without_gaps_from_start_to_end(name: str) -> None:
    for ranks, microbatches in ((1, 3), (3, 2), (4, 7)):
        timeline = simulate(build(name, ranks, microbatches), Costs(forward=1, input=1.25, weight=0.5))
        path = timeline.critical_path
        assert path[0].start == 0
        assert path[-1].end == timeline.makespan
        assert all(one.end == two.start for one, two in pairwise(path))
        assert sum(span.length for span in path) == timeline.makespan


@pytest.mark.parametrize(
    "costs", [Costs(hop=0.5), Costs(latency=0.5), Costs(latency=0.25, bandwidth=2, bytes=[3, 1, 1, 2, 3, 1, 2, 3])]
)
@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_between_ranks_the_critical_path_waits_for_the_message(name: str, costs: Costs) -> None:
    """Each gap on the path is a transfer: two ranks, a value that goes from the one to the other."""
    schedule = build(name, 4, 6)
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for one, two in pairwise(path):
        if one.rank == two.rank:
            assert one.end == two.start
        else:
            assert two.wait > 0
            assert two.start >= one.end + costs.wire(one.action.stage, two.action.stage, (one.rank, two.rank))[1]
            assert abs(one.action.stage - two.action.stage) == 1


def test_a_long_message_is_on_the_critical_path_though_its_maker_ended_early() -> None:
    """Rank 1 is busy until 4, but waits until 12 for what rank 0 had made by 2."""
    order = Schedule.from_text(["0F0 0F1", "1F0 1F1"])
    timeline = simulate(order, Costs(forward=1, bandwidth=1, bytes=[5, 0]))
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "0F1", "1F1"]
    assert timeline.makespan == 12


def test_peaks_count_what_is_in_flight() -> None:
    columns = Schedule.from_text("0F0 . 0F1 0I0 (0F2;0B1) 0W0 0B2").columns
    assert peaks(columns, forward_only=False) == (3,)
    assert peaks(columns, forward_only=True) == (1,)


def test_repr_is_short() -> None:
    assert repr(simulate(SCHEDULE)) == "<Timeline 8 spans, makespan 9, idle 33.3%>"
