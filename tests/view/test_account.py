"""The books balance, and what was made slow on purpose is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recorded import delay_link, pipeline, record

from penstock.schedule import FAMILIES, Costs, Op, Schedule, Span, Timeline, build, parse, simulate
from penstock.schedule.timing.timeline import Wall
from penstock.view import advice
from penstock.view.account import account

NAP = 0.01  # long enough that a machine with other work does not hide it


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


def costs(*forward: float) -> Costs:
    """Stages of which some take longer; their backwards take next to nothing."""
    return Costs(forward=forward, input=(0.1,) * len(forward), weight=(0.1,) * len(forward))


def test_a_slow_stage_is_named_with_what_its_repair_is_worth() -> None:
    books = account(simulate(build("1f1b", 4, 8), costs(1, 1, 2, 1)))
    assert books.findings[0].kind == "stage"
    assert books.advice.startswith("stage 2 (rank 2) is ")
    assert "slower than the others; a better balance would save " in books.advice
    assert 0.05 < books.findings[0].gain < 0.5
    assert max(books.path_shares(), key=lambda name: books.path_shares()[name]) == "rank 2"


def test_a_slow_rank_is_named_where_all_its_stages_are_slow() -> None:
    books = account(simulate(build("interleaved-1f1b", 3, 6), costs(*[1, 2.5, 1] * 2)))
    assert books.findings[0].kind == "rank"
    assert books.advice.startswith("rank 1 (stages 1, 4) is ")


@pytest.mark.parametrize("way", [(1, 2), (2, 1)])
def test_a_slow_link_is_named(way: tuple[int, int]) -> None:
    with pipeline([NAP] * 4, microbatches=6) as pipe:
        delay_link(pipe, *way, 4 * NAP)
        books = account(record(pipe))
    assert books.findings[0].kind == "link"
    assert f"the link from rank {way[0]} to rank {way[1]} takes " in books.advice
    for entry in books.ranks:
        assert entry.total == pytest.approx(entry.whole, rel=0.01)


def test_a_link_is_not_blamed_for_what_held_up_some_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine some messages wait long for their thread's turn; a link is slow for its fastest one too."""
    times = {(stage, stage + 1): [0.001] * 8 for stage in range(3)} | {(1, 2): [0.003, *[0.5] * 7]}
    monkeypatch.setattr(advice, "hops", lambda timeline: times)
    books = account(simulate(build("1f1b", 4, 8), Costs(hop=0.001)))
    assert "link" not in {finding.kind for finding in books.findings}
    times[1, 2] = [0.5] * 8
    books = account(simulate(build("1f1b", 4, 8), Costs(hop=0.001)))
    assert "the link from rank 1 to rank 2 takes 0.5 per message, 500 times the others" in books.advice


def test_a_good_run_is_left_alone() -> None:
    books = account(simulate(build("zb-v", 4, 64)))
    assert books.findings == ()
    assert books.advice.startswith("nothing stands out: every rank computes for 9")


def test_a_schedule_that_leaves_ranks_idle_is_told_of_a_better_one() -> None:
    books = account(simulate(build("gpipe", 4, 4)))
    assert books.advice.startswith("the schedule leaves ranks idle for 42.9 % of the time; ")


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
