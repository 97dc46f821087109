"""Notes that ranks leave for each other in the store: the first verdict and the first alarm stand, for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure.blame import State
from penstock.runtime.transport.failure.notes import Alarm, Bulletin


@pytest.fixture
def ranks() -> list[Bulletin]:
    store = dist.HashStore()

    def ask(method: str, *arguments: Any) -> Any:
        return getattr(store, method)(*arguments)

    return [Bulletin(ask, "penstock/0", rank, 2) for rank in range(2)]


def test_the_first_verdict_stands_and_all_read_it(ranks: list[Bulletin]) -> None:
    assert ranks[1].verdict() is None
    first, second = PeerFailure(1, "died or left"), PeerFailure(0, "silent")
    assert str(ranks[0].pronounce(first)) == str(first)
    assert str(ranks[1].pronounce(second)) == str(first)
    assert [str(each.verdict()) for each in ranks] == [str(first)] * 2
    ranks[0].tell_read()
    assert ranks[1].have_read([0])
    assert not ranks[1].have_read([0, 1])


def test_the_first_alarm_stands(ranks: list[Bulletin]) -> None:
    assert ranks[0].alarm() is None
    ranks[0].raise_alarm(Alarm(0, None, PeerFailure(1, "died or left")))
    ranks[1].raise_alarm(Alarm(1, None, PeerFailure(0, "silent"), heard=True))
    for each in ranks:
        found = each.alarm()
        assert found is not None
        assert (found.rank, str(found.failure), found.heard) == (0, str(PeerFailure(1, "died or left")), False)


def test_the_first_who_calls_an_alarm_off_is_heard_by_all(ranks: list[Bulletin]) -> None:
    assert ranks[0].called_off() is None
    ranks[0].call_off({1: 0.25})
    ranks[1].call_off({0: 3.0, 1: 3.0})
    assert [each.called_off() for each in ranks] == [{1: 0.25}] * 2


def test_news_are_of_one_step(ranks: list[Bulletin]) -> None:
    ranks[0].tell_news(3, PeerFailure(0, "it failed"))
    assert ranks[1].news(2) is None
    assert "it failed" in str(ranks[1].news(3))


def test_states_are_of_those_who_have_said_theirs(ranks: list[Bulletin]) -> None:
    state = State(None, "at 0F0", None, 7, "step()")
    ranks[0].tell_state(state)
    assert ranks[1].states(range(2)) == {0: state}


def test_calls_are_compared_only_where_all_have_told_theirs_after_as_many_exchanges(ranks: list[Bulletin]) -> None:
    ranks[0].tell_call(4, "step()")
    assert ranks[0].calls(4) == []
    ranks[1].tell_call(3, "evaluate()")
    assert ranks[0].calls(4) == []
    ranks[1].tell_call(4, "evaluate()")
    assert ranks[0].calls(4) == ["step()", "evaluate()"]


def test_a_look_is_needed_again_after_a_note_or_in_another_step(ranks: list[Bulletin]) -> None:
    """Twice a second every rank looks; with a thousand ranks the store answers one question each, and not three."""
    assert ranks[1].has_changed(0)
    assert ranks[1].has_changed(0)  # until the look is done: it may have ended in an error
    ranks[1].has_looked(0)
    assert not ranks[1].has_changed(0)
    assert ranks[1].has_changed(1)
    writes = [
        lambda: ranks[0].tell_news(1, PeerFailure(0, "it failed")),
        lambda: ranks[0].raise_alarm(Alarm(0, None, None)),
        lambda: ranks[0].call_off({1: 0.25}),
        lambda: ranks[0].pronounce(PeerFailure(1, "died or left")),
    ]
    for write in writes:
        ranks[1].has_looked(1)
        assert not ranks[1].has_changed(1)
        write()
        assert ranks[1].has_changed(1)
