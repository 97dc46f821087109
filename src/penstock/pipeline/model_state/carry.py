"""Values from the ranks that have them to those that want them, outside of a step.

Named ones go one after the other, in the same order on every rank, so that no more than a few of them are on the way at
a time; what later ranks need of a batch that only the first stage's rank was given goes to them straight from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.errors import PeerFailure, PenstockError, UsageError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.engine.report import failure_of
from penstock.runtime.transport import Channel, Transport
from penstock.schedule import Placement

if TYPE_CHECKING:
    from penstock.pipeline.batches import Call

AHEAD = 64 * 2**20  # bytes
Item = tuple[str, int, Sequence[int]]  # a name, the rank that has its value, and those that get it


def carry(
    transport: Transport | None,
    items: Iterable[Item],
    give: Callable[[str], Any],
    take: Callable[[str, Any], None],
) -> None:
    """Ask `give` once for each value that this rank has, and give `take` each that is for this rank.

    All ranks call it with the same items. Without a transport there is one rank.
    """
    for name, value in carried(transport, items, give):
        take(name, value)


def carried(
    transport: Transport | None,
    items: Iterable[Item],
    give: Callable[[str], Any],
    sizes: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all that is for this rank, one after the other; all ranks go through the same items.

    With `sizes`, in bytes and the same on all ranks, no rank gets further ahead of another than `AHEAD` bytes. A rank
    that leaves the loop early still hands out what the others wait for.
    """
    if transport is None:
        for name, _, _ in items:
            yield name, give(name)
        return
    walk = _walk(transport, list(items), give, sizes or {})
    try:
        for item in walk:  # noqa: UP028  (`yield from` would close it with this one)
            yield item
    except GeneratorExit:
        for _ in walk:
            pass
        raise


def _walk(
    transport: Transport, items: list[Item], give: Callable[[str], Any], sizes: Mapping[str, int]
) -> Iterator[tuple[str, Any]]:
    _check_alike(transport.exchange([name for name, _, _ in items]))
    sent = dict.fromkeys(sorted({(s, t) for _, s, targets in items for t in targets if s != t}), 0)
    numbers = {ends: number for number, ends in enumerate(sent)}
    transport.open([Channel(source, target, "F", source, target) for source, target in numbers])
    ahead = 0
    try:
        for name, source, targets in items:
            ahead += sizes.get(name, 0)
            if ahead > AHEAD:
                transport.flush()
                transport.exchange(None)
                ahead = 0
            value = give(name) if transport.rank == source else None
            for target in targets:
                ends = (source, target)
                if source == target:
                    continue
                if transport.rank == source:
                    transport.send(numbers[ends], sent[ends], value)
                elif transport.rank == target:
                    value = transport.receive(numbers[ends], sent[ends])
                sent[ends] += 1
            if transport.rank in targets:
                yield name, value
        transport.flush()
    except PeerFailure:
        raise
    except BaseException as error:
        transport.abort(failure_of(transport.rank, error, None))  # the others wait for what is not going to come
        raise
    transport.exchange(None)


def _check_alike(answers: Sequence[Sequence[str]]) -> None:
    """Check that all ranks know the same names: values go by their order."""
    odd = sorted({name for names in answers for name in set(names).symmetric_difference(answers[0])})
    if odd:
        known = [rank for rank, names in enumerate(answers) if odd[0] in names]
        raise UsageError(
            f"{odd[0]} exists on ranks {known} of {len(answers)} only, like a buffer that is made in a forward: "
            f"register it in __init__, as a tensor, so that every rank has it"
        )


def carry_batch(
    transport: Transport | None,
    placement: Placement,
    call: Call,
    cut: Callable[[], Batch],
    cut_part: Callable[[Call], Batch],
    needed_by: Callable[[Call, int], tuple[Any, ...]],
) -> Batch:
    """Send what later ranks need straight from the first stage's rank, and return this rank's part."""
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
    loss_kwargs = {**loss_kwargs, **call.loss_kwargs}
    batch = cut_part(replace(call, args=args, kwargs=kwargs, target=target, loss_kwargs=loss_kwargs))
    batch.rows = rows
    return batch
