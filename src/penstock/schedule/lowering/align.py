"""From a pure compute order to the grid of time slots.

Builders and users say in which order each rank computes; where the idle slots fall follows
from the dependencies. Every action takes one slot and what it makes can be used in the next
one. An order that cannot finish is an error that says where each rank stops and who waits
for whom: a shorter schedule is never returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import CycleMember, Fault, ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.dependencies import Stuck, Table, stuck_at, waits_in_cells, waits_of
from penstock.schedule.events import run
from penstock.schedule.proof.shape import shape_faults
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.seen import Row


def align(schedule: Schedule) -> Schedule:
    """Return the same order with idle slots where a rank must wait, so that all rows have equal length.

    Args:
        schedule: The schedule.
    """
    import numpy as np

    expect_schedule(schedule, "align")
    schedule = schedule.compute()
    shape = list(shape_faults(schedule))
    if shape:
        raise ScheduleError(shape)
    columns = schedule.columns
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    needs = waits_of(table, columns)
    lengths = np.ones(columns.size)
    lengths[columns.second] = 0.0  # a pair takes one slot
    outcome = run(columns.starts, lengths, waits_in_cells(columns, needs))
    if outcome.stuck:
        raise ScheduleError(stuck_faults(schedule.rows, stuck_at(columns, table, needs, outcome.stuck)))
    slots = outcome.ends.astype(np.int32)
    lengths_of_rows = (int(slots.max()),) * columns.ranks
    return schedule.replace(replace(columns, position=slots - 1, lengths=lengths_of_rows))


def stuck_faults(rows: Sequence[Row], stuck: Sequence[Stuck]) -> list[Fault]:
    """Report where each rank stops, and draw the ring of ranks that wait for each other."""
    where = {
        (part.stage, part.op, part.microbatch): (rank, position)
        for rank, row in enumerate(rows)
        for position, action in enumerate(row)
        if action is not None
        for part in action.parts()
    }
    faults, waits_for = [], {}
    for item in sorted(stuck):
        maker, place = item.maker, None
        for op in ("F",) if maker.op.name == "F" else ("B", "I"):
            candidate = Action(item.stage, maker.op.__class__[op], item.microbatch)
            if (item.stage, candidate.op, item.microbatch) in where:
                maker, place = candidate, where[item.stage, candidate.op, item.microbatch]
        if place is None:
            text = f"stops here: it waits for {maker}, which no rank runs"
        else:
            text = f"stops here: it waits for {maker}, which is at position {place[1]} of rank {place[0]}"
            waits_for[item.rank] = (place[0], f"rank {item.rank} at {item.action} waits for {maker} of rank {place[0]}")
        faults.append(Fault(text, item.rank, item.position, item.action))
    return faults + ring_faults(faults, waits_for)


def ring_faults(stuck: Sequence[Fault], waits_for: dict[int, tuple[int, str]]) -> list[Fault]:
    """Draw a cycle in `rank -> (rank that it waits for, sentence)` as one fault; `stuck` says where each stops."""
    where = {fault.rank: fault for fault in stuck}
    for start in waits_for:
        seen: list[int] = []
        rank = start
        while rank in waits_for and rank not in seen:
            seen.append(rank)
            rank = waits_for[rank][0]
        if rank in seen:
            ring = seen[seen.index(rank) :]
            arrows = "\n".join(f"    {waits_for[member][1]}" for member in ring)
            names = " -> ".join(f"rank {member}" for member in [*ring, ring[0]])
            cycle = tuple(CycleMember(member, where[member].position or 0, where[member].action) for member in ring)
            return [Fault(f"deadlock, each waits for the next: {names}\n{arrows}", cycle=cycle)]
    return []
