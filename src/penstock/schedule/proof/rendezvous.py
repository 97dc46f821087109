"""Does a program end when nothing is buffered?

The ranks are run against each other with the strictest transport. A rank goes through its program; a receive
only posts, and the compute that uses the value waits for it, with all that comes after. A transfer is at both of its
ends in a stream, where it begins when all that was posted there before it has ended, and both ends end together. A rank
goes on from a send when that has ended. (A device lets its host go on from all of these, and from nothing else: what
ends here ends there.) Whether all ranks end does not depend on who is run first, because no step ever takes anything
from another rank: so one run decides it.

A transfer thus ends with its send, which waits for its receive to be posted and for the transfers before it in both
streams. Those that its own rank sends have ended, since the rank has come this far. So have, where the receive is
posted, those that the receiver sends. What is left are receives: the last before it in each of the two streams. With
a stream for each direction both came from the same sender before, and no such wait is needed.

It relies on what verify has checked before: each link's receives are its sends in order, and on its own rank nothing
stands before what it needs.
"""

from __future__ import annotations

from penstock.errors import Fault
from penstock.schedule.columns import Array, Columns
from penstock.schedule.dependencies import Value
from penstock.schedule.events import Waits, run
from penstock.schedule.lowering.align import ring_faults
from penstock.schedule.proof.transfers import Transfers
from penstock.schedule.schedule import Schedule


def rendezvous_faults(schedule: Schedule, transfers: Transfers, links: str = "direction") -> list[Fault]:
    """Return an empty list when the program ends; else where each rank stops, and the ring."""
    import numpy as np

    columns, table, sends = schedule.columns, transfers.table, transfers.sends
    senders = np.full(table.size, columns.size, dtype=np.int32)
    senders[sends.elsewhere] = sends.numbers
    who, position = table.positions(columns, table.needed)
    away = senders[position] < columns.size
    who, position = who[away], position[away]
    later, earlier = _in_streams(columns, transfers, links)
    event = np.concatenate((sends.number, columns.cell[who], sends.number[later]))
    on = np.concatenate((transfers.receives.number, senders[position], sends.number[earlier]))
    del away, senders, who  # These are as large as the program.
    nothing = np.broadcast_to(0.0, max(columns.size, len(event)))
    outcome = run(columns.starts, nothing[: columns.size], Waits(event, on, nothing[: len(event)]))
    if not outcome.stuck:
        return []
    return _faults(schedule, transfers, links, event, position, earlier, outcome.stuck)


def _in_streams(columns: Columns, transfers: Transfers, links: str) -> tuple[Array, Array]:
    """Return pairs of transfers, by their numbers among the sends: the first waits in a stream for the second."""
    import numpy as np

    none = np.zeros(0, dtype=np.int32)
    if links == "direction":
        return none, none
    sends, receives = transfers.sends, transfers.receives
    count = len(sends.number)
    number = np.concatenate((sends.number, receives.number))  # both ends of each transfer
    here, there = (columns.rank[number], columns.rank[np.concatenate((receives.number, sends.number))])
    order = np.lexsort((number, there, here)) if links == "pair" else np.argsort(number)
    same = here[order[1:]] == here[order[:-1]]
    if links == "pair":
        same &= there[order[1:]] == there[order[:-1]]
    after, before = order[1:], order[:-1]
    waits = same & (before >= count)
    return after[waits] % count, before[waits] % count


def _faults(
    schedule: Schedule,
    transfers: Transfers,
    links: str,
    event: Array,
    position: Array,
    earlier: Array,
    stuck: list[tuple[int, int]],
) -> list[Fault]:
    """Report who is stuck, where, and for whom they wait: waits of sends, then of computes, then in streams."""
    found, ring = [], {}
    sends, receives = transfers.sends, transfers.receives
    for rank, number in stuck:
        if number >= len(sends.number) + len(position):
            first = int(earlier[number - len(sends.number) - len(position)])
            peer, target = transfers.ways[sends.way[first]]
            shared = f"ranks {min(peer, target)} and {max(peer, target)}" if links == "pair" else f"rank {target}"
            text = f"waits in the stream of {shared} for {schedule.place(int(receives.number[first]))[2]} before it"
        elif number < len(sends.number):
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
