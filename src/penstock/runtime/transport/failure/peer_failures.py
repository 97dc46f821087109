"""A `PeerFailure` in the words of whoever reports it: after a loss, with its place, with what each rank did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from penstock.errors import REBUILD, PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.transport.channel import Channel
from penstock.schedule import Action

CONNECTION_CLOSED = "died or left (its connection closed)"
STORE_GONE = "died or left (the store that it hosts is gone)"


def _with(failure: PeerFailure, **values: Any) -> PeerFailure:
    """Return a copy in which these attributes have other values."""
    named = copy(failure)
    vars(named).update(values)
    return named


def after_loss(loss: PeerFailure) -> PeerFailure:
    """Make the same loss, as the answer to a later call."""
    return copy(loss) if REBUILD in loss.cause else _with(loss, cause=f"{loss.cause}; {REBUILD}")


def failure_from(text: bytes, peer: int) -> PeerFailure:
    """Make the failure that a peer sent in the place of a message."""
    try:
        failure = plain.loads(text)
    except plain.NotPlainError as error:
        return PeerFailure(peer, f"it failed, and what it said of that cannot be read: {error}")
    if not isinstance(failure, PeerFailure):
        return PeerFailure(peer, f"it failed, and said no more than {type(failure).__name__}")
    return failure


def stopped_by_force(rank: int) -> PeerFailure:
    """Make the loss of a group in which Ctrl-C has ended a step while its messages were under way."""
    return PeerFailure(rank, f"KeyboardInterrupt: Ctrl-C, again, ended a step in the middle of a message; {REBUILD}")


def whole_again(error: BaseException) -> BaseException:
    """Return the same error without the advice to rebuild the group, where that is not needed."""
    if not isinstance(error, PeerFailure) or REBUILD not in error.cause:
        return error
    named = _with(error, cause=error.cause.removesuffix(f"; {REBUILD}"))
    named.__cause__ = error.__cause__
    return named


def located(failure: PeerFailure, action: Action | None) -> PeerFailure:
    """Return the same failure at the action that the rank was at, where it could report that."""
    if action is None:
        return failure
    return _with(failure, stage=action.stage, action=str(action), microbatch=action.microbatch)


def placed(failure: PeerFailure, axes: Mapping[str, int]) -> PeerFailure:
    """Return the same failure with its replica and shard, where it has none."""
    return _with(failure, **{axis: number for axis, number in axes.items() if getattr(failure, axis) is None})


def with_report(failure: PeerFailure, doing: Sequence[str]) -> PeerFailure:
    """Return the same failure with what each rank was doing."""
    lines = ["what each rank was doing:", *(f"  rank {rank}: {it}" for rank, it in enumerate(doing))]
    return _with(failure, report="\n".join(lines))


def lost_source(channel: Channel, microbatch: int, cause: str) -> PeerFailure:
    """Make the failure of a rank that should have sent and did not. Below 0, no microbatch was due yet."""
    if microbatch < 0:
        cause = f"{cause} while rank {channel.target_rank} made ready for what it would send, the {channel}"
        return PeerFailure(channel.source_rank, cause, stage=channel.source_stage)
    cause = f"{cause} while rank {channel.target_rank} waited in {channel.receive_action(microbatch)}"
    action = channel.send_action(microbatch)
    return PeerFailure(channel.source_rank, cause, stage=channel.source_stage, action=action, microbatch=microbatch)


def lost_target(channel: Channel, microbatch: int, cause: str) -> PeerFailure:
    """Make the failure of a rank that should have received and did not."""
    cause = f"{cause} while rank {channel.source_rank} waited in {channel.send_action(microbatch)}"
    action = channel.receive_action(microbatch)
    return PeerFailure(channel.target_rank, cause, stage=channel.target_stage, action=action, microbatch=microbatch)
