"""Named values from the ranks that have them to those that want them, outside of a step.

One after the other, in the same order on every rank, so that no more than a few of them are on the way at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.engine.report import failure_of
from penstock.runtime.transport import Channel, Transport

Item = tuple[str, int, Sequence[int]]  # a name, the rank that has its value, and those that get it


def carry(
    transport: Transport | None,
    items: Iterable[Item],
    give: Callable[[str], Any],
    take: Callable[[str, Any], None],
) -> None:
    """`give` is asked once for each value that this rank has, and `take` gets each that is for this rank.

    All ranks call it with the same items. Without a transport there is one rank.
    """
    if transport is None:
        for name, _, _ in items:
            take(name, give(name))
        return
    items = list(items)
    _check_alike(transport.exchange([name for name, _, _ in items]))
    sent = dict.fromkeys(sorted({(s, t) for _, s, targets in items for t in targets if s != t}), 0)
    numbers = {ends: number for number, ends in enumerate(sent)}
    transport.open([Channel(source, target, "F", source, target) for source, target in numbers])
    try:
        for name, source, targets in items:
            value = give(name) if transport.rank == source else None
            for target in targets:
                ends = (source, target)
                if source == target:
                    if transport.rank == source:
                        take(name, value)
                    continue
                if transport.rank == source:
                    transport.send(numbers[ends], sent[ends], value)
                elif transport.rank == target:
                    take(name, transport.receive(numbers[ends], sent[ends]))
                sent[ends] += 1
        transport.flush()
    except PeerFailure:
        raise
    except BaseException as error:
        transport.abort(failure_of(transport.rank, error, None))  # the others wait for what is not going to come
        raise
    transport.exchange(None)


def _check_alike(answers: Sequence[Sequence[str]]) -> None:
    """Values go by their order, so that a name which one rank does not know would give all others the wrong ones."""
    odd = sorted({name for names in answers for name in set(names).symmetric_difference(answers[0])})
    if odd:
        known = [rank for rank, names in enumerate(answers) if odd[0] in names]
        raise UsageError(
            f"{odd[0]} exists on ranks {known} of {len(answers)} only, like a buffer that is made in a forward: "
            f"register it in __init__, as a tensor, so that every rank has it"
        )
