"""Rows of events that run in order, each when what it waits for has happened: the one loop of all passes.

Aligning, simulating and proving ask the same question: a rank goes through its row, an event may have to wait for one
of another row, and when does each end, if all of them do? They differ in what an event takes and in who waits for
whom, which they say in arrays.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from penstock.schedule.columns import Array

MANY = 64  # rows, and events in each, from which it pays to run all rows together


class Waits(NamedTuple):
    """Wait i: `event[i]` starts `delay[i]` after the end of `on[i]`, or later.

    Events are numbered row by row; the number after the last stands for what never happens.
    """

    event: Array
    on: Array
    delay: Array


class Outcome(NamedTuple):
    """When each event ended (-1: never), and (row, number of the wait) of each row that cannot go on."""

    ends: Array
    stuck: list[tuple[int, int]]


def run(starts: Array, lengths: Array, waits: Waits) -> Outcome:
    """Run rows of events: row r has those from `starts[r]` to before `starts[r + 1]`, which take `lengths`."""
    import numpy as np

    size = len(lengths)
    waits_at = np.zeros(size, dtype=bool)
    waits_at[waits.event] = True
    if np.count_nonzero(waits_at) == len(waits.event):
        steps = _Steps(starts, None, waits.event, waits.on, slice(None), lengths)
    else:
        steps = _steps(starts, lengths, waits)
    total = len(steps.lengths)
    on = np.full(total, -1, dtype=np.int32)
    on[steps.step] = steps.on
    delay = np.broadcast_to(0.0, total)
    if waits.delay.any():
        delay = np.zeros(total)
        delay[steps.step] = waits.delay if steps.order is None else waits.delay[steps.order]
    rows = _Rows(steps.starts, on, delay, steps.lengths)
    if min(len(starts) - 1, size // len(starts)) >= MANY:
        rows.run_together()
    rows.run_in_turn()
    place = {rows.cursors[row]: row for stuck in rows.waiting.values() for row in stuck}
    numbers = np.flatnonzero(np.isin(steps.step, list(place))).tolist() if place else ()
    stuck = sorted(
        (place[int(steps.step[number])], number if steps.order is None else int(steps.order[number]))
        for number in numbers
    )
    return Outcome(np.frombuffer(rows.ends)[:-1][steps.where], stuck)


class _Steps(NamedTuple):
    """Events as steps that wait for one other at most.

    Wait `order[i]`, or i without an order, is that of `step[i]` for step `on[i]`. Event e is the step `where[e]`.
    """

    starts: Array
    order: Array | None
    step: Array
    on: Array
    where: Array
    lengths: Array


def _steps(starts: Array, lengths: Array, waits: Waits) -> _Steps:
    """Put steps of no length before an event with several waits; they wait for all but the last of them."""
    import numpy as np

    order = np.argsort(waits.event, kind="stable")
    event = waits.event[order]
    counts = np.bincount(event, minlength=len(lengths))
    more = np.maximum(counts - 1, 0)
    where = np.arange(len(lengths)) + np.cumsum(more)
    total = int(where[-1]) + 1
    step = where[event] - counts[event] + 1 + np.arange(len(event)) - (np.cumsum(counts) - counts)[event]
    on = np.append(where, total)[waits.on[order]]
    spread = np.zeros(total)
    spread[where] = lengths
    return _Steps(np.append(where - more, total)[starts], order, step, on, where, spread)


class _Rows:
    """The rows, each at some step. They may be run together, as far as that pays, and then in turn to their ends.

    A step of all rows at once costs as much as some thirty steps of one row.
    """

    def __init__(self, first: Array, on: Array, delay: Array, length: Array) -> None:
        self.first, self.on, self.delay, self.length = first, on, delay, length
        self.ends = array("d", [-1.0]) * (len(on) + 1)
        self.cursors: list[int] = first.tolist()
        self.clocks = [0.0] * len(first)
        self.waiting: dict[int, list[int]] = {}  # step -> rows that wait for its end

    def run_together(self) -> None:
        """Let every row that can take one step, again and again, until too few of them can."""
        import numpy as np

        ends, delay, length = np.frombuffer(self.ends), self.delay, self.length
        cursors, clocks, stops = self.first[:-1].copy(), np.zeros(len(self.first) - 1), self.first[1:]
        live = np.flatnonzero(cursors < stops)
        done, turns = 0, -2 * len(cursors)  # a pipeline fills slowly
        while len(live) and done >= MANY // 2 * turns:
            step = cursors[live]
            on = self.on[step]
            there = np.where(on < 0, 0.0, ends[on])
            can = there >= 0.0
            if not can.all():
                live_now, step, there = live[can], step[can], there[can]
                if not len(step):
                    break
            else:
                live_now = live
            now = np.maximum(clocks[live_now], there + delay[step]) + length[step]
            ends[step] = clocks[live_now] = now
            step += 1
            cursors[live_now] = step
            if (step == stops[live_now]).any():
                live = live[cursors[live] < stops[live]]
            done, turns = done + len(step), turns + 1
        self.cursors[:-1] = cursors.tolist()
        self.clocks[:-1] = clocks.tolist()

    def run_in_turn(self) -> None:
        """Let one row after the other go as far as it can."""
        if self.cursors[:-1] == self.first[1:].tolist():
            return
        on, delay, length = _plain("i", self.on), _plain("d", self.delay), _plain("d", self.length)
        stops, ends, cursors, clocks, waiting = self.first.tolist(), self.ends, self.cursors, self.clocks, self.waiting
        ready = [row for row in range(len(stops) - 2, -1, -1) if cursors[row] < stops[row + 1]]
        while ready:
            row = ready.pop()
            step, stop, now = cursors[row], stops[row + 1], clocks[row]
            while step < stop:
                needed = on[step]
                if needed >= 0:
                    there = ends[needed]
                    if there < 0.0:
                        waiting.setdefault(needed, []).append(row)
                        break
                    there += delay[step]
                    if there > now:
                        now = there
                now += length[step]
                ends[step] = now
                if step in waiting:
                    ready += waiting.pop(step)
                step += 1
            cursors[row], clocks[row] = step, now


def _plain(kind: str, values: Array) -> array[Any]:
    """Return the same numbers in an array that plain Python reads quickly."""
    found: array[Any] = array(kind)
    found.frombytes(values.tobytes())
    return found
