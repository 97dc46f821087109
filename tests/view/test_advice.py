"""What was made slow on purpose is named, and a good run is left alone."""

from __future__ import annotations

import pytest
from recorded import delay_link, pipeline, record

from penstock.schedule import Costs, build, simulate
from penstock.view import advice
from penstock.view.account import account

NAP = 0.01  # long enough that a machine with other work does not hide it


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
