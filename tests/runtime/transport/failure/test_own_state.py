"""What a rank says of itself: for how long it has stood still, and without being kept alive for it."""

from __future__ import annotations

from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.own_state import OwnState, held_weakly


def test_a_rank_has_stood_still_since_it_was_first_seen_where_it_is() -> None:
    now = [0.0]
    own = OwnState(lambda: now[0])
    own.doing = lambda: "at 1F0"
    waiting = Waiting(2, None, -1, 0.0)
    for now[0] in (1.0, 5.0):
        own.look(waiting)
    now[0] = 8.0
    assert own.state(waiting).seconds_unchanged == 7.0
    assert own.state(waiting).doing == "at 1F0, waiting for rank 2"
    own.look(None)  # the wait is over
    assert own.state(None).seconds_unchanged == 0.0
    own.step += 1
    now[0] = 9.0
    own.look(None)  # in the next step at the same action
    assert own.state(None).seconds_unchanged == 0.0


def test_a_wait_without_a_channel_is_described_by_what_it_is_for() -> None:
    """A rank that connected in its first step, or met others in save(), was said to be at the end of a step."""
    own = OwnState(lambda: 0.0)
    own.call = lambda: "step()"
    assert own.reason == "in the exchange that ends the step"
    with own.connecting("for their second connection"):
        lost = Waiting(2, None, -1, 0.0, own.reason).blame(1, "died or left")
        assert str(lost) == "rank 2 failed: died or left while rank 1 waited for their second connection"
    own.call = lambda: "save()"
    assert own.reason == "in an exchange of save()"


class Rank:
    def doing(self) -> str:
        return "at 0F0"


def test_a_rank_that_is_gone_is_not_kept_alive_to_be_asked() -> None:
    rank = Rank()
    doing = held_weakly(rank.doing, "gone")
    assert doing() == "at 0F0"
    del rank
    assert doing() == "gone"
    assert held_weakly(lambda: "a function", "gone")() == "a function"
