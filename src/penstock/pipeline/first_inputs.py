"""inputs="first": only the rank of the first stage is given the batch, and sends other ranks what they need of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import PeerFailure, PenstockError, UsageError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.transport import Channel, Transport
from penstock.schedule import Placement

if TYPE_CHECKING:
    from penstock.pipeline.batches import Call


def carry_batch(
    transport: Transport | None,
    placement: Placement,
    call: Call,
    cut: Callable[[], Batch],
    cut_part: Callable[..., Batch],
    needed_by: Callable[[Call, int], tuple[Any, ...]],
) -> Batch:
    """inputs='first': what later ranks need goes to them straight from the first stage's rank."""
    home = placement.rank_of(0)
    if transport is None or placement.ranks == 1:
        return cut()
    channels = [
        Channel(-1, placement.stages_of(rank)[0], "F", home, rank) for rank in range(placement.ranks) if rank != home
    ]
    transport.open(channels)
    if transport.rank == home:
        try:
            batch = cut()
            for number, channel in enumerate(channels):
                transport.send(number, 0, (needed_by(call, channel.target_rank), batch.rows))
        except PenstockError as error:
            for number in range(len(channels)):
                transport.send_failure(number, 0, PeerFailure(home, f"{type(error).__name__}: {error}"))
            raise
        finally:
            transport.flush()
        return batch
    number = next(number for number, channel in enumerate(channels) if channel.target_rank == transport.rank)
    (args, kwargs, target, loss_kwargs), rows = transport.receive(number, 0)
    is_last = placement.rank_of(placement.stages - 1) == transport.rank
    if call.args or call.kwargs or (call.target is not None and (target is not None or not is_last)):
        raise UsageError(
            f"BatchOptions(inputs='first'): only rank {home} passes a batch to step(); rank {transport.rank} did too "
            f"(the target alone may come from the last stage's rank)"
        )
    target = call.target if target is None else target
    batch = cut_part(args, kwargs, target, {**loss_kwargs, **call.loss_kwargs})
    batch.rows = rows
    return batch
