"""The books balance: what a rank does and waits for adds up to its step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded import pipeline, record

from penstock.schedule import FAMILIES, Costs, Op, Schedule, Span, Timeline, build, parse, simulate
from penstock.schedule.timing.timeline import Wall
from penstock.view.account import account


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_simulation_are_its_makespan(name: str) -> None:
    books = account(simulate(build(name, 4, 6), Costs(forward=1, input=1.2, weight=0.7, hop=0.1)))
    for entry in books.ranks:
        assert entry.whole == books.timeline.makespan
        assert entry.total == pytest.approx(entry.whole, rel=1e-9)
        assert sum(entry.compute.values()) == pytest.approx(books.timeline.busy[entry.rank])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v", "dualpipe-v"])
def test_the_parts_of_a_run_are_its_wall_time_within_a_percent(schedule: str) -> None:
    with pipeline([0.001] * 4, schedule=schedule) as pipe:
        books = account(record(pipe))
    for entry in books.ranks:
        assert entry.total == pytest.approx(entry.whole, rel=0.01)
        assert entry.host > 0
        assert entry.optimizer > 0
        assert entry.sends > 0


def test_every_part_goes_where_it_belongs() -> None:
    """Times that add up by hand: rank 0's step is 8 long."""
    schedule = Schedule.from_text(["0F0 0B0", "1F0 1B0"])
    spans = (
        Span(0, parse("0F0"), 1.0, 2.0),
        Span(0, parse("0B0"), 5.0, 6.0, 2.75),
        Span(1, parse("1F0"), 2.5, 3.5, 1.5),
        Span(1, parse("1B0"), 3.5, 4.5),
    )
    chores = (
        Span(0, parse("0SEND_F0"), 2.0, 2.25),
        Span(1, parse("1SEND_B0"), 4.5, 4.75),
        Span(0, parse("0REDUCE_GRAD"), 6.0, 6.5),
    )
    walls = (Wall(0.0, 6.75, 8.0, 0.5), Wall(0.0, 4.75, 8.0, 0.5))
    books = account(Timeline(schedule, spans, chores=chores, walls=walls, unit="s"))
    zero, one = books.ranks
    assert zero.compute == {Op.F: 1, Op.B: 1, Op.I: 0, Op.W: 0}
    assert zero.waiting == {1: 2.75}
    assert (zero.sends, zero.reduction, zero.optimizer, zero.host) == (0.5, 0.5, 0.5, 0.5 + 1.25)
    assert zero.total == zero.whole == 8.0
    assert one.waiting == {0: 1.5 + 2.0}  # for 0F0, and at the end for rank 0
    assert one.total == one.whole == 8.0
    assert books.path_shares() == {"rank 0": 2.0, "rank 1": 2.0, "rank 0 -> 1": 0.5, "rank 1 -> 0": 0.5}
    assert json.loads(json.dumps(books.document()))["ranks"][0]["parts"]["wait for rank 1"] == 2.75


def test_half_a_recording_is_accounted_for_without_advice() -> None:
    schedule = Schedule.from_text(["0F0", "1F0"])
    books = account(Timeline(schedule, (Span(0, parse("0F0"), 0.0, 1.0),)))
    assert books.findings == ()
    assert account(Timeline(schedule, ())).findings == ()


def test_the_books_read_as_text() -> None:
    text = str(account(simulate(build("1f1b", 2, 2))))
    assert text.splitlines()[0] == "rank 0: 9 = F 22.2 %, B 44.4 %, wait for rank 1 33.3 %"


def test_a_core_for_each_rank_comes_before_any_advice() -> None:
    """No other balance and no other schedule helps ranks that take turns on a core."""
    timeline = simulate(build("1f1b", 4, 6))
    said = {cores: str(account(replace(timeline, spans=timeline.spans, cores=cores))) for cores in (0, 2, 4, 8)}
    assert said[0] == said[4] == said[8]
    said_first = said[2].splitlines()[-1]
    assert said_first.startswith("give each rank a core first (2 for 4 ranks here), and measure again; as measured: ")
