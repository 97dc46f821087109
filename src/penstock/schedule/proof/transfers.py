"""Which value a transfer moves, over which directed link; and whether both ends agree.

A directed link is an ordered pair of ranks. Whatever the values, its receives must be its
sends in the same order: transports deliver in order, so two swapped messages of one shape
would otherwise be trained on in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.errors import Fault
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.columns import Array
from penstock.schedule.dependencies import Table, Value
from penstock.schedule.schedule import Schedule
from penstock.schedule.topology import Link, links

_PARTNER = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}


class Move(NamedTuple):
    """What one kind of transfer does, for every microbatch."""

    way: int  # number of the directed link
    sent: tuple[int, ...]  # table bases of the values at the sending rank
    received: tuple[int, ...]  # At the receiving rank.


class Ends(NamedTuple):
    """All sends of a program, or all receives: by directed link, and on a link in the order of the rows."""

    number: Array  # Numbers in the columns.
    way: Array  # number of the directed link
    message: Array  # the same at both ends
    # By move, the number of its transfer, and its positions in the table at this end and at the other.
    numbers: Array
    positions: Array
    elsewhere: Array


class Transfers:
    """The transfers of a program.

    ways[number]      (sending rank, receiving rank)
    sends, receives   those that move a value of the topology
    strays            numbers of those that do not
    """

    def __init__(self, schedule: Schedule, table: Table) -> None:
        import numpy as np

        self.table = table
        self.ways: list[tuple[int, int]] = []
        self._ways: dict[tuple[int, int], int] = {}
        self._moves: list[Move] = []
        self._kinds: dict[tuple[int, ...], int] = {}  # (op, stage, peer) -> its move; peer is -1 between neighbours
        for link in links(schedule.placement, schedule.topology):
            self._enter(link)
        self._columns = schedule.columns
        numbers, moves = self._all()
        self.strays = numbers[moves < 0]
        receiving = np.isin(self._columns.op[numbers], (Op.RECV_F, Op.RECV_B))
        self.sends, self.receives = (
            self._ends(numbers[chosen], moves[chosen], sending)
            for sending, chosen in ((True, ~receiving & (moves >= 0)), (False, receiving & (moves >= 0)))
        )

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
            self._kinds[op, stage, -1 if link.target == link.source + 1 else far] = move

    def _move(self, source: int, target: int, values: list[tuple[Value, int]], reader: int) -> int:
        way = self._ways.setdefault((source, target), len(self.ways))
        if way == len(self.ways):
            self.ways.append((source, target))
        at = self.table.base
        sent, received = (tuple(at(value, stage, rank, reader) for value, stage in values) for rank in (source, target))
        self._moves.append(Move(way, sent, received))
        return len(self._moves) - 1

    def _all(self) -> tuple[Array, Array]:
        """Return the numbers of all transfers, and of their moves: -1 where the topology has no such link."""
        import numpy as np

        columns = self._columns
        numbers = np.flatnonzero((columns.op >= Op.SEND_F) & (columns.op <= Op.RECV_B)).astype(np.int32)
        op, stage, peer = (column[numbers] for column in (columns.op, columns.stage, columns.peer))
        usual = np.full((len(Op), self.table.stages), -1, dtype=np.int32)
        for (kind, near, far), move in self._kinds.items():
            if far < 0:
                usual[kind, near] = move
        moves = usual[op, stage]
        skipping = np.flatnonzero(peer >= 0)
        kinds, which = np.unique(np.stack((op, stage, peer))[:, skipping], axis=1, return_inverse=True)
        known = np.array([self._kinds.get(tuple(kind), -1) for kind in kinds.T.tolist()], dtype=np.int32)
        moves[skipping] = known[which.ravel()]
        return numbers, moves

    def _ends(self, numbers: Array, moves: Array, sending: bool) -> Ends:
        import numpy as np

        way = np.array([move.way for move in self._moves], dtype=np.int32)[moves]
        order = np.argsort(way, kind="stable")
        numbers, moves, way = numbers[order], moves[order], way[order]
        microbatch = self._columns.microbatch[numbers]
        whole: Any = np.int32 if self.table.size < 2**31 else np.int64
        filled: list[tuple[Array, Array, Array]] = []
        for k in range(max((len(move.sent) for move in self._moves), default=1)):
            near, far = (
                np.array([bases[k] if k < len(bases) else -1 for bases in ends], dtype=whole)[moves]
                for ends in ([move.sent for move in self._moves], [move.received for move in self._moves])
            )
            there = near >= 0 if k else slice(None)  # a move has one value at least
            filled.append((numbers[there], near[there] + microbatch[there], far[there] + microbatch[there]))
        places, sent, received = filled[0] if len(filled) == 1 else map(np.concatenate, zip(*filled, strict=True))
        message = moves.astype(whole) * self.table.microbatches + microbatch
        return Ends(numbers, way, message, places, *((sent, received) if sending else (received, sent)))


def partner(action: Action) -> Action:
    """Return the other end of a transfer."""
    stage, op, microbatch, peer, _ = action
    if peer is None:
        return trusted(action.other_end, _PARTNER[op], microbatch)
    return trusted(peer, _PARTNER[op], microbatch, stage)


def link_faults(schedule: Schedule, transfers: Transfers) -> Iterator[Fault]:
    """Check that on each directed link the receives are the sends, in the same order."""
    import numpy as np

    sends, receives = transfers.sends, transfers.receives
    if np.array_equal(sends.way, receives.way) and np.array_equal(sends.message, receives.message):
        return
    for number, way in enumerate(transfers.ways):
        sent, received = ((ends.way == number).nonzero()[0] for ends in (sends, receives))
        if not np.array_equal(sends.message[sent], receives.message[received]):
            yield from _one_link(
                way,
                [schedule.place(place)[1:] for place in sends.number[sent].tolist()],
                [schedule.place(place)[1:] for place in receives.number[received].tolist()],
            )


def _one_link(
    way: tuple[int, int], sends: list[tuple[int, Action]], receives: list[tuple[int, Action]]
) -> Iterator[Fault]:
    source, target = way
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
