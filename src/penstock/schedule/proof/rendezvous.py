"""Does a program end when nothing is buffered?

The ranks are run against each other with the strictest transport: each directed link keeps
its order, and a send ends only when the receive that it belongs to is posted. A receive
only posts; the compute that uses the value waits for the send to have ended. Whether all
ranks end does not depend on who is run first, because no step ever takes anything from
another rank: so one run decides it.

It relies on what verify has checked before: each link's receives are its sends in order, and on its own rank nothing
stands before what it needs.
"""

from __future__ import annotations

from penstock.errors import Fault
from penstock.schedule.columns import Array
from penstock.schedule.dependencies import Value
from penstock.schedule.events import Waits, run
from penstock.schedule.lowering.align import ring_faults
from penstock.schedule.proof.transfers import Transfers
from penstock.schedule.schedule import Schedule

__all__ = ["rendezvous_faults"]


def rendezvous_faults(schedule: Schedule, transfers: Transfers) -> list[Fault]:
    """An empty list when the program ends; else where each rank stops, and the ring."""
    import numpy as np

    columns, table, sends = schedule.columns, transfers.table, transfers.sends
    senders = np.full(table.size, columns.size, dtype=np.int32)
    senders[sends.elsewhere] = sends.numbers
    who, position = table.positions(columns, table.needed)
    away = senders[position] < columns.size
    who, position = who[away], position[away]
    event = np.concatenate((sends.number, columns.cell[who]))
    on = np.concatenate((transfers.receives.number, senders[position]))
    del away, senders, who  # as large as the program
    nothing = np.broadcast_to(0.0, max(columns.size, len(event)))
    outcome = run(columns.starts, nothing[: columns.size], Waits(event, on, nothing[: len(event)]))
    if not outcome.stuck:
        return []
    return _faults(schedule, transfers, event, position, outcome.stuck)


def _faults(
    schedule: Schedule, transfers: Transfers, event: Array, position: Array, stuck: list[tuple[int, int]]
) -> list[Fault]:
    """Who is stuck, where, and for whom they wait. The waits are those of the sends, then those of the computes."""
    found, ring = [], {}
    sends = transfers.sends
    for rank, number in stuck:
        if number < len(sends.number):
            peer, text = transfers.ways[sends.way[number]][1], "waits until its receive is posted"
        else:
            value, stage, _, microbatch = transfers.table.name(int(position[number - len(sends.number)]))
            peer = schedule.placement.rank_of(stage)
            text = f"waits for {stage}{'F' if value is Value.OUTPUT else 'B'}{microbatch}"
        cell = int(schedule.columns.position[event[number]])
        action = schedule.columns.row(rank)[cell]
        found.append(Fault(f"stops here: it {text} (rank {peer})", rank, cell, action))
        ring[rank] = (peer, f"rank {rank} at {action} {text} (rank {peer})")
    return found + ring_faults(found, ring)
