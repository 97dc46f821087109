"""Which value a transfer moves, over which directed link; and whether both ends agree.

A directed link is an ordered pair of ranks. Whatever the values, its receives must be its
sends in the same order: transports deliver in order, so two swapped messages of one shape
would otherwise be trained on in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import Fault
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.dependencies import Table, Value
from penstock.schedule.schedule import Schedule
from penstock.schedule.topology import Link, links

__all__ = ["Move", "Transfers", "link_faults", "partner"]

RECEIVES = frozenset((Op.RECV_F, Op.RECV_B))
_PARTNER = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}


class Move(NamedTuple):
    """What one kind of transfer does, for every microbatch."""

    way: int  # number of the directed link
    message: int  # + microbatch: a number for the message, the same at both ends
    sent: tuple[int, ...]  # table bases of the values at the sending rank
    received: tuple[int, ...]  # and at the receiving rank


class Transfers:
    """The move of each (op, stage), prepared once.

    usual[op][stage]            transfers between neighbouring stages
    skipping[op, stage, peer]   transfers that name their other end
    ways[number]                (sending rank, receiving rank)
    """

    def __init__(self, schedule: Schedule, table: Table) -> None:
        self.table = table
        self.ways: list[tuple[int, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._messages = 0
        self.usual: list[list[Move | None]] = [[None] * schedule.stages for _ in Op]
        self.skipping: dict[tuple[Op, int, int], Move] = {}
        for link in links(schedule.placement, schedule.topology):
            self._enter(link)

    def _enter(self, link: Link) -> None:
        home, away = link.source_rank, link.target_rank
        there = self._move(home, away, [(Value.OUTPUT, link.source)], link.target)
        back = self._move(away, home, [(Value.GRADIENT, target) for target in link.targets], link.source)
        for op, stage, far, move in (
            (Op.SEND_F, link.source, link.target, there),
            (Op.RECV_F, link.target, link.source, there),
            (Op.SEND_B, link.target, link.source, back),
            (Op.RECV_B, link.source, link.target, back),
        ):
            if link.target == link.source + 1:
                self.usual[op][stage] = move
            else:
                self.skipping[op, stage, far] = move

    def _move(self, source: int, target: int, values: list[tuple[Value, int]], reader: int) -> Move:
        number = self._numbers.setdefault((source, target), len(self.ways))
        if number == len(self.ways):
            self.ways.append((source, target))
        message = self._messages
        self._messages += self.table.microbatches
        at = self.table.base
        return Move(
            number,
            message,
            tuple(at(value, stage, source, reader) for value, stage in values),
            tuple(at(value, stage, target, reader) for value, stage in values),
        )

    def move(self, action: Action) -> Move | None:
        """What a transfer moves, or None when the topology has no such link."""
        if action[3] is None:
            return self.usual[action[1]][action[0]]
        return self.skipping.get((action[1], action[0], action[3]))


def partner(action: Action) -> Action:
    """The other end of a transfer."""
    stage, op, microbatch, peer, _ = action
    if peer is None:
        return trusted(action.other_end, _PARTNER[op], microbatch)
    return trusted(peer, _PARTNER[op], microbatch, stage)


def link_faults(schedule: Schedule, transfers: Transfers) -> Iterator[Fault]:
    """On each directed link the receives are the sends, in the same order."""
    sends: list[list[int]] = [[] for _ in transfers.ways]
    receives: list[list[int]] = [[] for _ in transfers.ways]
    first, last, receive_f, receive_b = Op.SEND_F, Op.RECV_B, Op.RECV_F, Op.RECV_B
    usual = transfers.usual
    for row in schedule.rows:
        for action in row:
            if action is None:
                continue
            op = action[1]
            if first <= op <= last:
                move = usual[op][action[0]] if action[3] is None else transfers.move(action)
                if move is not None:
                    book = receives if op is receive_f or op is receive_b else sends
                    book[move[0]].append(move[1] + action[2])
    for number, way in enumerate(transfers.ways):
        if sends[number] != receives[number]:
            yield from _one_link(schedule, transfers, number, way)


def _one_link(schedule: Schedule, transfers: Transfers, number: int, way: tuple[int, int]) -> Iterator[Fault]:
    source, target = way
    sends = list(_on_link(schedule, transfers, number, source, receiving=False))
    receives = list(_on_link(schedule, transfers, number, target, receiving=True))
    wanted = [partner(action) for _, action in sends]
    posted = [action for _, action in receives]
    unsent, unposted = set(posted).difference(wanted), set(wanted).difference(posted)
    for position, action in sends:
        if partner(action) in unposted:
            yield Fault(f"has no receive {partner(action)} on rank {target}", source, position, action)
    for position, action in receives:
        if action in unsent:
            yield Fault(f"has no send {partner(action)} on rank {source}", target, position, action)
    for rank, entries in ((source, sends), (target, receives)):
        seen: set[Action] = set()
        for position, action in entries:
            if action in seen:
                yield Fault("is there twice on this link", rank, position, action)
            seen.add(action)
    if unsent or unposted or len(sends) != len(receives):
        return
    for turn, ((position, sent), (where, received)) in enumerate(zip(sends, receives, strict=True)):
        if partner(sent) != received:
            yield Fault(
                f"is message {turn} from rank {source} to rank {target}, but the receive posted for that "
                f"message is {received} (rank {target}, position {where}): the two orders differ",
                source,
                position,
                sent,
            )


def _on_link(
    schedule: Schedule, transfers: Transfers, number: int, rank: int, *, receiving: bool
) -> Iterator[tuple[int, Action]]:
    for position, action in enumerate(schedule.rows[rank]):
        if action is not None and action.op.is_transfer and (action.op in RECEIVES) == receiving:
            move = transfers.move(action)
            if move is not None and move.way == number:
                yield position, action
