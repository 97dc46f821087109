"""From a compute schedule to the program that is run, by small passes from value to value.

`insert_transfers` reads the grid column by column. In one slot, every rank first posts the
receives of what arrives by the end of the slot, then computes, then sends what it made:

    slot     post        compute  send
    rank 0               0F1      0SEND_F1
    rank 1   1RECV_F1    1F0      1SEND_F0

So a receive is always posted before its send starts and one compute before its value is
used, each link's receives stand in the order of its sends, and lock step through the slots
is a run in which no send ever waits. Ranks that wait only for what is there cannot lock up
in any other order either, so the program ends on every transport whose two directions between
ranks do not wait for each other, also on one that buffers nothing; `verify` proves it again
from the program alone. (Where they do share a stream, two ranks that both post a receive
before they send wait for ever, as in the picture with a backward: `verify(program, links="pair")`.)

All passes are linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.columns import Array, Columns, blocks
from penstock.schedule.dependencies import Table, waits_of
from penstock.schedule.lowering.align import align
from penstock.schedule.proof.shape import shape_faults
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.seen import PASSES, passes_seen
from penstock.schedule.topology import links


def lower(schedule: Schedule, *, reduce: bool = False, window: int | None = None) -> Schedule:
    """Turn a schedule into a program: add the transfers and, on request, reductions and sharding.

    Args:
        schedule: The schedule.
        reduce: Whether to add `REDUCE_GRAD` after the last backward of each stage.
        window: For sharded parameters: how many stages per rank are complete at a time, the present one and those that
            are needed next.
    """
    _refuse_after(schedule, PASSES, "lower")
    program = insert_transfers(schedule)
    if reduce:
        program = insert_reductions(program)
    if window is not None:
        program = insert_shards(program, window)
    return program


def _refuse_after(schedule: Schedule, passes: Iterable[str], what: str) -> None:
    """Refuse a pass after one that it would undo, or after itself: it reads only what it knows."""
    expect_schedule(schedule, what)
    there = (schedule.passes | passes_seen(schedule.ops)).intersection(passes)
    if there:
        raise UsageError(
            f"the schedule is lowered already ({', '.join(sorted(there))}); {what} starts from its computes: "
            f"{what}(schedule.compute())"
        )


def insert_transfers(schedule: Schedule) -> Schedule:
    """Add a send, and a receive that is posted early, wherever a value crosses ranks; drop idle slots.

    Args:
        schedule: The schedule.
    """
    _refuse_after(schedule, PASSES, "insert_transfers")
    shape = list(shape_faults(schedule))
    if shape:
        raise ScheduleError(shape)
    if not is_aligned(schedule):
        schedule = align(schedule)
    return schedule.replace(_with_messages(schedule), passes=schedule.passes | {"transfers"})


def _with_messages(schedule: Schedule) -> Columns:
    """Put the computes in the order of their slots, each slot with its receives before and its sends after."""
    import numpy as np

    columns, messages = schedule.columns, _messages(schedule)
    bounds = np.searchsorted(messages.rank[messages.kind], np.arange(columns.ranks + 1))
    starts = columns.starts + bounds
    size = int(starts[-1])
    position, stage, microbatch = (np.empty(size, dtype=np.int32) for _ in range(3))
    op, peer = np.empty(size, dtype=np.int8), np.full(size, -1, dtype=np.int32)
    second = np.zeros(columns.size, dtype=bool)
    second[columns.second] = True
    lengths: list[int] = []
    for rank in range(columns.ranks):
        own, sent = slice(*columns.starts[rank : rank + 2]), slice(*bounds[rank : rank + 2])
        after, kind = messages.after[sent], messages.kind[sent]
        phase = np.where(np.isin(messages.op[kind], RECEIVES), 0, 2)
        # In a slot, receives stand in the order of their senders and sends in the order of what made them. Both were
        # found in that order, and the sort keeps it.
        slots = np.concatenate((columns.position[own] * np.int64(3) + 1, columns.position[after] * np.int64(3) + phase))
        order = np.argsort(slots, kind="stable")
        row = slice(*starts[rank : rank + 2])
        for found, computes, transfers in (
            (stage, columns.stage, messages.stage[kind]),
            (op, columns.op, messages.op[kind]),
            (peer, columns.peer, messages.peer[kind]),
            (microbatch, columns.microbatch, columns.microbatch[after]),
        ):
            found[row] = np.concatenate((computes[own], transfers))[order]
        new_cell = np.concatenate((~second[own], np.ones(len(after), dtype=bool)))[order]
        position[row] = np.cumsum(new_cell) - 1
        lengths.append(int(np.count_nonzero(new_cell)))
    return Columns(tuple(lengths), starts, position, stage, op, microbatch, peer)


RECEIVES = (Op.RECV_F, Op.RECV_B)


class _Messages(NamedTuple):
    """Transfers by rank, and on a rank in the order of the computes that they follow. The rest is by their kind."""

    after: Array  # the number of the compute
    kind: Array
    stage: Array
    op: Array
    peer: Array
    rank: Array


def _messages(schedule: Schedule) -> _Messages:
    """Return all transfers that a schedule needs."""
    import numpy as np

    columns = schedule.columns
    by_stage = np.argsort(columns.stage, kind="stable").astype(np.int32)
    bounds = np.searchsorted(columns.stage[by_stage], np.arange(schedule.stages + 1)).tolist()
    kinds: list[tuple[int, Op, int, int]] = []
    computes: list[Array] = [np.zeros(0, dtype=np.int32)]

    def add(after: Array, *kind: Any) -> None:
        kinds.append(kind)
        computes.append(after)

    for link in links(schedule.placement, schedule.topology):
        source, target = link.source, link.target
        near, far = (-1, -1) if target == source + 1 else (source, target)
        here = by_stage[bounds[source] : bounds[source + 1]]
        ahead = here[columns.op[here] == Op.F]
        add(ahead, source, Op.SEND_F, far, link.source_rank)
        add(ahead, target, Op.RECV_F, near, link.target_rank)
        backs = []
        for reader in link.targets:
            there = by_stage[bounds[reader] : bounds[reader + 1]]
            backs.append(there[(columns.op[there] == Op.B) | (columns.op[there] == Op.I)])
        back = backs[0] if len(backs) == 1 else _last_of(columns, backs, schedule.microbatches)
        add(back, target, Op.SEND_B, near, link.target_rank)
        add(back, source, Op.RECV_B, far, link.source_rank)
    del by_stage
    fields = np.array(kinds, dtype=np.int32).reshape(-1, 4).T
    kind = np.repeat(np.arange(len(kinds), dtype=np.int32), [len(after) for after in computes[1:]])
    after = np.concatenate(computes)
    computes.clear()
    order = np.lexsort((after, fields[3][kind]))
    return _Messages(after[order], kind[order], *fields)


def _last_of(columns: Columns, backs: list[Array], microbatches: int) -> Array:
    """Return, by microbatch, the compute after which a link that several stages of a rank read has all gradients."""
    import numpy as np

    last = np.full((len(backs), microbatches), -1, dtype=np.int32)
    for row, back in zip(last, backs, strict=True):
        row[columns.microbatch[back]] = back
    return last.max(axis=0)[last.min(axis=0) >= 0]


def is_aligned(schedule: Schedule) -> bool:
    """Return whether each action stands in a later slot than everything that it needs from other ranks."""
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    columns = schedule.columns
    needs = waits_of(table, columns)
    if (needs.on == columns.size).any():
        return False
    in_turn = (columns.position[needs.on[some]] < columns.position[needs.who[some]] for some in blocks(len(needs.on)))
    return all(bool(part.all()) for part in in_turn)


def insert_reductions(schedule: Schedule) -> Schedule:
    """Add `REDUCE_GRAD` for each stage after its last backward.

    What that backward sends goes first, because another rank waits for it and nobody waits for the reduction yet.

    Args:
        schedule: The schedule, or a program with transfers.
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
    """Add `UNSHARD` before a stage is needed, and `RESHARD` when it leaves the window.

    The window is the stage that computes next and the `window - 1` different stages that compute after it. An
    overlapped pair of two stages needs both, whatever the window. A reduction needs the complete gradients, so it
    counts as a use.

    Args:
        schedule: The schedule, or a program with transfers.
        window: How many stages per rank are complete at a time.
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
    """Return, for each use of a stage, that stage and the next different ones, `window` in all."""
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
