"""From a compute schedule to the program that is run, by small passes from value to value.

`insert_transfers` reads the grid column by column. In one slot, every rank first posts the
receives of what arrives by the end of the slot, then computes, then sends what it made:

    slot     post        compute  send
    rank 0               0F1      0SEND_F1
    rank 1   1RECV_F1    1F0      1SEND_F0

So a receive is always posted before its send starts and one compute before its value is
used, each link's receives stand in the order of its sends, and lock step through the slots
is a run in which no send ever waits. Ranks that wait only for what is there cannot lock up
in any other order either, so the program ends on every transport, also on one that buffers
nothing; `verify` proves it again from the program alone.

All passes are linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.align import align
from penstock.schedule.dependencies import Table
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.seen import PASSES, passes_seen
from penstock.schedule.topology import Link, links

__all__ = ["insert_reductions", "insert_shards", "insert_transfers", "lower"]


def lower(schedule: Schedule, *, reduce: bool = False, window: int | None = None) -> Schedule:
    """The program of a schedule: transfers, and on request reductions and sharding.

    `reduce` puts REDUCE_GRAD after the last backward of each stage. `window` is for sharded
    parameters: so many stages are whole at a time, this one and the next that will be needed.
    """
    _refuse_after(schedule, PASSES, "lower")
    program = insert_transfers(schedule)
    if reduce:
        program = insert_reductions(program)
    if window is not None:
        program = insert_shards(program, window)
    return program


def _refuse_after(schedule: Schedule, passes: Iterable[str], what: str) -> None:
    """A pass reads what it knows: it cannot come after one that it would undo, nor after itself."""
    expect_schedule(schedule, what)
    there = (schedule.passes | passes_seen(schedule.rows)).intersection(passes)
    if there:
        raise UsageError(
            f"the schedule is lowered already ({', '.join(sorted(there))}); {what} starts from its computes: "
            f"{what}(schedule.compute())"
        )


def insert_transfers(schedule: Schedule) -> Schedule:
    """Add a send and an early-posted receive wherever a value crosses ranks; drop idle slots."""
    _refuse_after(schedule, PASSES, "insert_transfers")
    shape = list(schedule.shape_faults())
    if shape:
        raise ScheduleError(shape)
    if not is_aligned(schedule):
        schedule = align(schedule)
    messages = _Messages(schedule)
    rows: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for column in zip_longest(*schedule.rows):
        sends: list[tuple[int, Action]] = []
        for rank, action in enumerate(column):
            if action is not None:
                for stage, op, microbatch, _, _ in (action,) if action[4] is None else action[4]:
                    for sending, target_rank, receiving in messages.after(stage, op, microbatch):
                        sends.append((rank, sending))
                        rows[target_rank].append(receiving)
        for rank, action in enumerate(column):
            if action is not None:
                rows[rank].append(action)
        for rank, action in sends:
            rows[rank].append(action)
    return schedule.replace(rows, passes=schedule.passes | {"transfers"})


class _Messages:
    """Which transfers follow a compute.

    Prepared for each (op, stage) as (link, send's stage, op and peer, receiving rank, receive's
    stage, op and peer), so that only the microbatch is left to fill in.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._plans: list[list[list[Any]]] = [[[] for _ in range(schedule.stages)] for _ in range(Op.W + 1)]
        for link in links(schedule.placement, schedule.topology):
            source, target = link.source, link.target
            near, far = (None, None) if target == source + 1 else (source, target)
            there = (link, source, Op.SEND_F, far, link.target_rank, target, Op.RECV_F, near)
            back = (link, target, Op.SEND_B, near, link.source_rank, source, Op.RECV_B, far)
            self._plans[Op.F][source].append(there)
            for reader in link.targets:
                self._plans[Op.B][reader].append(back)
                self._plans[Op.I][reader].append(back)
        # of a link that several stages of a rank read, how many gradients are still to come
        self._missing: dict[tuple[Link, int | None], int] = {}

    def after(self, stage: int, op: Op, microbatch: int | None) -> Iterator[tuple[Action, int, Action]]:
        """(send, receiving rank, receive) of each message that is complete with this compute."""
        for link, near, send, far, rank, target, receive, source in self._plans[op][stage]:
            if op == 0 or len(link.targets) == 1 or self._last(link, microbatch):
                yield trusted(near, send, microbatch, far), rank, trusted(target, receive, microbatch, source)

    def _last(self, link: Link, microbatch: int | None) -> bool:
        left = self._missing.get((link, microbatch), len(link.targets)) - 1
        self._missing[link, microbatch] = left
        return left == 0


def is_aligned(schedule: Schedule) -> bool:
    """Does each action stand in a later slot than everything that it needs from other ranks?"""
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    done = bytearray(table.size)
    needed, made, carried = table.needed, table.made, table.carried
    for column in zip_longest(*schedule.rows):
        fresh: list[int] = []
        for action in column:
            if action is None:
                continue
            if action[4] is not None:
                if not all(done[key] for key in table.needs_of(action)):
                    return False
            else:
                stage, op, microbatch = action[0], action[1], action[2]
                for base in needed[op][stage]:
                    if not done[base + microbatch]:
                        return False
            for stage, op, microbatch, _, _ in (action,) if action[4] is None else action[4]:
                for base in made[op][stage]:
                    fresh.append(base + microbatch)
                for _, base in carried[op][stage]:
                    fresh.append(base + microbatch)
        for key in fresh:
            done[key] = 1
    return True


def insert_reductions(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD for each stage after its last backward, by order and not by number.

    What that backward sends goes first: another rank waits for it, and for the reduction nobody does yet.
    """
    _refuse_after(schedule, ("reductions", "shards"), "insert_reductions")
    rows = []
    for row in schedule.rows:
        last: dict[int, int] = {}
        for position, action in enumerate(row):
            if action is not None:
                for part in action.parts():
                    if part.op in (Op.B, Op.W):
                        last[part.stage] = position
        due: dict[int, list[int]] = {}
        for stage, position in last.items():
            due.setdefault(position, []).append(stage)
        filled: list[Action | None] = []
        ready: list[int] = []  # stages whose reduction waits for the sends to leave
        for position, action in enumerate(row):
            if ready and not (action is not None and action.op.is_transfer):
                filled += [trusted(stage, Op.REDUCE_GRAD) for stage in ready]
                ready = []
            filled.append(action)
            ready += due.get(position, ())
        rows.append(filled + [trusted(stage, Op.REDUCE_GRAD) for stage in ready])
    return schedule.replace(rows, passes=schedule.passes | {"reductions"})


def insert_shards(schedule: Schedule, window: int) -> Schedule:
    """UNSHARD each stage before it is needed and RESHARD it when it leaves the window.

    The window is the stage that computes next and the `window - 1` different stages that
    compute after it; an overlapped pair of two stages needs both, whatever the window. A
    reduction needs the whole gradients, so it counts as a use.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UsageError(f"window must be a whole number of at least 1 (the stage that computes), got {window!r}")
    _refuse_after(schedule, ("shards",), "insert_shards")
    rows = [_shard_row(row, window) for row in schedule.rows]
    return schedule.replace(rows, passes=schedule.passes | {"shards"})


def _shard_row(row: tuple[Action | None, ...], window: int) -> list[Action | None]:
    ahead = _next_stages(row, window)
    whole: list[int] = []
    filled: list[Action | None] = []
    for action, wanted in zip(row, ahead, strict=True):
        if wanted is not None:
            for stage in [stage for stage in whole if stage not in wanted]:
                whole.remove(stage)
                filled.append(trusted(stage, Op.RESHARD))
            for stage in wanted:
                if stage not in whole:
                    whole.append(stage)
                    filled.append(trusted(stage, Op.UNSHARD))
        filled.append(action)
    return filled + [trusted(stage, Op.RESHARD) for stage in whole]


def _next_stages(row: tuple[Action | None, ...], window: int) -> list[tuple[int, ...] | None]:
    """For each use of a stage: that stage and the next different ones, `window` in all."""
    ahead: list[tuple[int, ...] | None] = [None] * len(row)
    coming: list[int] = []  # the different stages from here on, nearest first
    for position in range(len(row) - 1, -1, -1):
        action = row[position]
        if action is None or action.op.is_transfer:
            continue
        for part in reversed(action.parts()):
            if part.stage in coming:
                coming.remove(part.stage)
            coming.insert(0, part.stage)
        own = len({part.stage for part in action.parts()})
        del coming[max(window, own) :]
        ahead[position] = tuple(coming)
    return ahead
