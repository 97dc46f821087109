"""From a pure compute order to the grid of time slots.

Builders and users say in which order each rank computes; where the idle slots fall follows
from the dependencies. Every action takes one slot and what it makes can be used in the next
one. An order that cannot finish is an error that says where each rank stops and who waits
for whom: a shorter schedule is never returned.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Fault, ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.dependencies import Row, Stuck, Table, walk
from penstock.schedule.schedule import Schedule, expect_schedule

__all__ = ["align", "stuck_faults"]


def align(schedule: Schedule) -> Schedule:
    """The same order with idle slots where a rank must wait, all rows of equal length."""
    expect_schedule(schedule, "align")
    schedule = schedule.compute()
    shape = list(schedule.shape_faults())
    if shape:
        raise ScheduleError(shape)
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    needed, made, carried = table.needed, table.made, table.carried
    after = [0] * table.size  # the first slot in which the value can be used
    rows: list[list[Action | None]] = [[] for _ in schedule.rows]
    stuck: list[Stuck] = []
    for rank, _, action in walk(schedule.rows, table, stuck):
        row = rows[rank]
        slot = len(row)
        if action[4] is None:
            stage, op, microbatch = action[0], action[1], action[2]
            for base in needed[op][stage]:
                ready = after[base + microbatch]
                if ready > slot:
                    slot = ready
        else:
            slot = max([slot, *(after[key] for key in table.needs_of(action))])
        if slot > len(row):
            row += [None] * (slot - len(row))
        row.append(action)
        slot += 1
        for stage, op, microbatch, _, _ in (action,) if action[4] is None else action[4]:
            for base in made[op][stage]:
                after[base + microbatch] = slot
            for _, base in carried[op][stage]:
                after[base + microbatch] = slot
    if stuck:
        raise ScheduleError(stuck_faults(schedule.rows, stuck))
    slots = max(map(len, rows))
    return schedule.replace([*row, *[None] * (slots - len(row))] for row in rows)


def stuck_faults(rows: Sequence[Row], stuck: Sequence[Stuck]) -> list[Fault]:
    """Say where each rank stops, and draw the ring of ranks that wait for each other."""
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
    return faults + ring_faults(waits_for)


def ring_faults(waits_for: dict[int, tuple[int, str]]) -> list[Fault]:
    """One fault that draws a cycle in `rank -> (rank that it waits for, sentence)`."""
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
            return [Fault(f"deadlock, each waits for the next: {names}\n{arrows}")]
    return []
