"""Does a program end when nothing is buffered?

The ranks are run against each other with the strictest transport: each directed link keeps
its order, and a send ends only when the receive that it belongs to is posted. A receive
only posts; the compute that uses the value waits for the send to have ended. Whether all
ranks end does not depend on who is run first, because no step ever takes anything from
another rank: so one run decides it.

It relies on what verify has checked before: each link's receives are its sends in order.
"""

from __future__ import annotations

from penstock.errors import Fault
from penstock.schedule.action import Action, Op
from penstock.schedule.align import ring_faults
from penstock.schedule.dependencies import Value
from penstock.schedule.schedule import Schedule
from penstock.schedule.transfers import Transfers

__all__ = ["rendezvous_faults"]


def rendezvous_faults(schedule: Schedule, transfers: Transfers) -> list[Fault]:
    """An empty list when the program ends; else where each rank stops, and the ring."""
    run = _Run(schedule, transfers)
    while run.ready:
        run.go_on(run.ready.pop())
    return run.faults()


class _Run:
    def __init__(self, schedule: Schedule, transfers: Transfers) -> None:
        self.rows = schedule.rows
        self.placement = schedule.placement
        self.transfers = transfers
        self.table = transfers.table
        self.done = bytearray(self.table.size)
        self.cursors = [0] * schedule.ranks
        self.waiting: dict[int, list[int]] = {}  # position of a value -> ranks whose compute needs it
        self.blocked: dict[int, int] = {}  # directed link -> the rank whose send waits for a receive
        self.credit = [0] * len(transfers.ways)  # receives posted ahead of sends, by directed link
        self.ready = list(range(schedule.ranks - 1, -1, -1))

    def go_on(self, rank: int) -> None:
        """Run one rank until it ends or must wait."""
        row, done, needed, made = self.rows[rank], self.done, self.table.needed, self.table.made
        usual, credit = self.transfers.usual, self.credit
        last_compute, last_transfer, receive_f, receive_b = Op.W, Op.RECV_B, Op.RECV_F, Op.RECV_B
        for position in range(self.cursors[rank], len(row)):
            action = row[position]
            if action is None:
                continue
            stage, op, microbatch, peer, pair = action
            if op <= last_compute:
                for base in needed[op][stage]:
                    if not done[base + microbatch]:
                        return self._wait(rank, position, base + microbatch)
                for base in made[op][stage]:
                    done[base + microbatch] = 1
            elif op <= last_transfer:
                move = usual[op][stage] if peer is None else self.transfers.move(action)
                way = move[0]  # type: ignore[index]
                if op is receive_f or op is receive_b:
                    credit[way] += 1
                    if way in self.blocked:
                        self.ready.append(self.blocked.pop(way))
                elif credit[way]:
                    credit[way] -= 1
                    self._arrive(move[3], microbatch)  # type: ignore[index]
                else:
                    self.blocked[way] = rank
                    self.cursors[rank] = position
                    return None
            elif pair is not None:
                for key in self.table.needs_of(action):
                    if not done[key]:
                        return self._wait(rank, position, key)
                self._done(pair)
        self.cursors[rank] = len(row)
        return None

    def _wait(self, rank: int, position: int, key: int) -> None:
        self.waiting.setdefault(key, []).append(rank)
        self.cursors[rank] = position

    def _arrive(self, bases: tuple[int, ...], microbatch: int) -> None:
        for base in bases:
            key = base + microbatch
            self.done[key] = 1
            if key in self.waiting:
                self.ready += self.waiting.pop(key)

    def _done(self, parts: tuple[Action, ...]) -> None:
        for stage, op, microbatch, _, _ in parts:
            for base in self.table.made[op][stage]:
                self.done[base + microbatch] = 1

    def faults(self) -> list[Fault]:
        """Who is stuck, where, and for whom they wait."""
        waits: dict[int, tuple[int, str]] = {}
        for key, ranks in self.waiting.items():
            value, stage, _, microbatch = self.table.name(key)
            what = f"{stage}{'F' if value is Value.OUTPUT else 'B'}{microbatch}"
            for rank in ranks:
                waits[rank] = (self.placement.rank_of(stage), f"waits for {what}")
        for way, rank in self.blocked.items():
            waits[rank] = (self.transfers.ways[way][1], "waits until its receive is posted")
        found, ring = [], {}
        for rank in sorted(waits):
            peer, text = waits[rank]
            action = self.rows[rank][self.cursors[rank]]
            found.append(Fault(f"stops here: it {text} (rank {peer})", rank, self.cursors[rank], action))
            ring[rank] = (peer, f"rank {rank} at {action} {text} (rank {peer})")
        return found + ring_faults(ring)
