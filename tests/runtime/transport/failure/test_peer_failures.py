"""A failure in the words of whoever tells of it: its place, what each rank did, and what to do next."""

from __future__ import annotations

from penstock.errors import REBUILD, PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.peer_failures import (
    after_loss,
    failure_from,
    located,
    lost_source,
    lost_target,
    placed,
    whole_again,
    with_report,
)
from penstock.schedule import Action

LOSS = PeerFailure(2, "died or left")
FORWARD = Channel(1, 2, "F", 1, 2)


def test_a_later_call_is_told_to_rebuild_the_group_once() -> None:
    later = after_loss(after_loss(LOSS))
    assert str(later).count(REBUILD) == 1
    assert REBUILD not in str(LOSS)
    assert str(whole_again(later)) == str(LOSS)


def test_what_is_no_loss_is_left_as_it_is() -> None:
    error = KeyError("mine")
    assert whole_again(error) is error
    assert whole_again(LOSS) is LOSS


def test_a_failure_that_came_in_the_place_of_a_message_is_read_or_said_to_be_unreadable() -> None:
    assert str(failure_from(plain.dumps(LOSS), 0)) == str(LOSS)
    for content in (b"garbage", plain.dumps((1, 2))):
        found = failure_from(content, 3)
        assert found.rank == 3
        assert "it failed, and" in found.cause


def test_a_failure_is_located_at_what_its_rank_did() -> None:
    assert located(LOSS, None) is LOSS
    found = located(LOSS, Action.parse("5I1"))
    assert (found.stage, found.action, found.microbatch) == (5, "5I1", 1)
    assert "5I1" in str(found)
    assert LOSS.action is None


def test_its_replica_is_added_where_it_has_none() -> None:
    found = placed(LOSS, {"replica": 1})
    assert found.replica == 1
    assert placed(found, {"replica": 0}).replica == 1
    assert LOSS.replica is None


def test_a_report_has_a_line_for_each_rank() -> None:
    assert str(with_report(LOSS, ["at 0F0", "no answer"])).endswith(
        "what each rank was doing:\n  rank 0: at 0F0\n  rank 1: no answer"
    )


def test_the_end_that_is_gone_is_named_with_what_was_due() -> None:
    source, target = lost_source(FORWARD, 3, "silent"), lost_target(FORWARD, 3, "silent")
    assert (source.rank, source.stage, source.action, source.microbatch) == (1, 1, "1SEND_F3", 3)
    assert "silent while rank 2 waited in 2RECV_F3" in str(source)
    assert (target.rank, target.stage, target.action, target.microbatch) == (2, 2, "2RECV_F3", 3)
    assert "silent while rank 1 waited in 1SEND_F3" in str(target)


def test_a_rank_that_is_lost_before_its_first_message_is_due_is_named_without_a_microbatch():
    """It was told as `0SEND_F-1`, which is in no program."""
    lost = lost_source(FORWARD, -1, "died or left")
    assert (lost.rank, lost.stage, lost.action, lost.microbatch) == (
        FORWARD.source_rank,
        FORWARD.source_stage,
        None,
        None,
    )
    assert f"while rank {FORWARD.target_rank} made ready for what it would send, the {FORWARD}" in lost.cause
    assert "-1" not in str(lost)
