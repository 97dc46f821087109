"""When each job of a small pipeline can run if all is to end by a given time: the rules that narrow it down.

A job has a window: its earliest start and its latest end. The rules here make windows smaller without losing a
schedule; where one becomes too small for its job, no schedule ends by that time. `refutation.py` asks the questions.

Arrays have one row per job and one column per question, so that many questions are answered together. The rules for
machines are the usual ones for jobs that run one at a time: from when a set of them can be done at the earliest follows
what cannot come before it, and what cannot come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schedule.columns import Array

ROUNDING = 1e-10


class Arc(NamedTuple):
    """A job starts `lag` after the end of another, or later."""

    before: int
    after: int
    lag: float


class Item(NamedTuple):
    """Memory that a forward takes on its rank. Its I leaves `held` of it, and its W nothing."""

    forward: int
    input: int
    weight: int
    activation: float
    held: float


@dataclass
class Windows:
    """Earliest starts and latest ends: a row per job, a column per question."""

    start: Array
    end: Array

    def chosen(self, which: Array) -> Windows:
        """Copy some of the questions."""
        return Windows(self.start[:, which], self.end[:, which])


class Rules:
    """What all schedules of a pipeline obey, as rules for windows.

    Args:
        lengths: The time of each job. Jobs are numbered so that what precedes comes first.
        arcs: What must precede what.
        machines: The jobs that run one at a time.
        memory: The cap and the items of each rank that has one.
    """

    def __init__(
        self,
        lengths: Sequence[float],
        arcs: Sequence[Arc],
        machines: Sequence[Sequence[int]],
        memory: Sequence[tuple[float, Sequence[Item]]],
    ) -> None:
        import numpy as np

        self.lengths = np.array(lengths, dtype=float)
        self.one_by_one = sum(lengths) + sum(arc.lag for arc in arcs)  # The time if nothing overlaps.
        self.tolerance = ROUNDING * self.one_by_one
        self.machines = [np.array(jobs) for jobs in machines if len(jobs) > 1]
        self._into: list[list[tuple[int, float]]] = [[] for _ in lengths]
        self._out: list[list[tuple[int, float]]] = [[] for _ in lengths]
        for before, after, lag in arcs:
            self._into[after].append((before, lag + lengths[before]))
            self._out[before].append((after, lag + lengths[after]))
        self.before = np.zeros((len(lengths), len(lengths)), dtype=bool)  # [a, b]: a precedes b in every schedule
        for job, into in enumerate(self._into):
            for other, _ in into:
                self.before[:, job] |= self.before[:, other]
                self.before[other, job] = True
        self._memory = [_Memory(cap, items, self.lengths, self.before, self.tolerance) for cap, items in memory]

    def narrow(self, windows: Windows, rounds: int = 40) -> Array:
        """Narrow windows down as far as the rules go; says for which questions no schedule is left."""
        import numpy as np

        questions = windows.start.shape[1]
        refuted = np.zeros(questions, dtype=bool)
        live = np.arange(questions)
        now = windows
        for _ in range(rounds):
            before = now.start.sum(axis=0) - now.end.sum(axis=0)
            self._along_arcs(now)
            for jobs in self.machines:
                self._on_machine(now, jobs)
            for memory in self._memory:
                memory.narrow(now)
            slack = now.end - now.start - self.lengths[:, None]
            lost = (slack < -self.tolerance).any(axis=0)
            refuted[live[lost]] = True
            windows.start[:, live], windows.end[:, live] = now.start, now.end
            moving = ~lost & (now.start.sum(axis=0) - now.end.sum(axis=0) > before + self.tolerance)
            live = live[moving]
            if not len(live):
                break
            now = now.chosen(moving)
        return refuted

    def _along_arcs(self, windows: Windows) -> None:
        import numpy as np

        start, end = windows.start, windows.end
        for job, into in enumerate(self._into):
            for other, time in into:
                np.maximum(start[job], start[other] + time, out=start[job])
        for job in reversed(range(len(self._out))):
            for other, time in self._out[job]:
                np.minimum(end[job], end[other] - time, out=end[job])

    def _on_machine(self, windows: Windows, jobs: Array) -> None:
        import numpy as np

        lengths = self.lengths[jobs]
        start, end = windows.start[jobs], windows.end[jobs]
        for _ in range(2):  # forwards, and the same backwards in time
            later, earlier = _one_at_a_time(start, end, lengths, self.tolerance)
            start, end = -np.minimum(end, earlier), -np.maximum(start, later)
        windows.start[jobs], windows.end[jobs] = start, end


def _one_at_a_time(start: Array, end: Array, lengths: Array, tolerance: float) -> tuple[Array, Array]:
    """Return new earliest starts and latest ends of the jobs of one machine."""
    import numpy as np

    count, questions = start.shape
    order = np.argsort(start, axis=0, kind="stable")
    columns = np.arange(questions)
    length = lengths[:, None]
    latest = end - length  # start
    own = np.eye(count, dtype=bool)[:, :, None]
    # [j, i]: before, i cannot come before j; short, j must be done when i must be; other, i may come before j
    before = (start + length > latest[:, None] + tolerance) & ~own
    short = end[:, None] <= end
    other = (latest[:, None] < end - tolerance) & ~own
    done = np.full((3, count, questions), -np.inf)
    for place in range(count):
        job = order[place]
        begin, time = start[job, columns], lengths[job]
        for number, chosen in enumerate((before, short, other)):
            taken = chosen[job, :, columns].T
            now = done[number]
            np.copyto(now, np.maximum(now, begin) + time, where=taken)
    later = np.where(before.any(axis=0), done[0], -np.inf)
    overload = (done[1] > end + tolerance).any(axis=0)
    later[:, overload] = np.inf
    last = np.where(other, latest[:, None], -np.inf).max(axis=0)
    earlier = np.where(done[2] > latest + tolerance, last, np.inf)
    return later, earlier


class _Memory:
    """The memory of one rank: how early its forwards find room, and how late its backwards may give it back."""

    def __init__(self, cap: float, items: Sequence[Item], lengths: Array, before: Array, tolerance: float) -> None:
        import numpy as np

        self.cap, self.tolerance = cap, tolerance
        self.forward, self.input, self.weight = (np.array([item[place] for item in items]) for place in range(3))
        activation, held = (np.array([item[place] for item in items]) for place in (3, 4))
        self.activation = activation
        self.least = np.minimum(activation, held)  # What an item holds whose I may be done.
        self.lengths = lengths
        none = np.eye(len(items), dtype=bool)
        f, i, w = self.forward, self.input, self.weight
        self.not_own = ~none[:, :, None]
        # [item, f]: taken before f starts; I, W come after f. [item, r]: the same about a release
        self.taken = before[np.ix_(f, f)][:, :, None]
        self.input_after = before[np.ix_(f, i)].T[:, :, None]
        self.weight_after = before[np.ix_(f, w)].T[:, :, None]
        self.releases = np.concatenate((w, i))
        self.taken_before = before[np.ix_(f, self.releases)][:, :, None]
        self.input_follows = before[np.ix_(self.releases, i)].T[:, :, None]
        self.weight_follows = before[np.ix_(self.releases, w)].T[:, :, None]
        self.own = np.concatenate((self.least, activation))[:, None]  # a full B holds no more than the activation
        self.other = np.concatenate((self.not_own, self.not_own), axis=1)

    def narrow(self, windows: Windows) -> None:
        """Take a step towards room for every forward, and for everything that is held before a release."""
        import numpy as np

        start, end, lengths = windows.start, windows.end, self.lengths
        tolerance = self.tolerance
        time = start[self.forward]
        begun = end[self.forward] - lengths[self.forward, None]
        inputs, weights = (start[jobs] + lengths[jobs, None] for jobs in (self.input, self.weight))  # ends
        there = self.taken | (begun[:, None] <= time + tolerance)
        given = ~self.weight_after & (weights[:, None] <= time + tolerance)
        partly = ~self.input_after & (inputs[:, None] <= time + tolerance)
        size = np.where(given, 0.0, np.where(partly, self.least[:, None, None], self.activation[:, None, None]))
        used = np.where(there & self.not_own, size, 0.0).sum(axis=0) + self.activation[:, None]
        ends = np.concatenate((inputs, weights))
        after = np.where(ends[:, None] > time + tolerance, ends[:, None], np.inf).min(axis=0)
        start[self.forward] = np.where(used > self.cap, after, time)

        time = end[self.releases]
        gone = ~self.taken_before & (begun[:, None] >= time - tolerance)
        whole = self.input_follows | (inputs[:, None] >= time - tolerance)
        rest = self.weight_follows | (weights[:, None] >= time - tolerance)
        size = np.where(whole, self.activation[:, None, None], np.where(rest, self.least[:, None, None], 0.0))
        used = np.where(~gone & self.other, size, 0.0).sum(axis=0) + self.own
        first = np.where(begun[:, None] < time - tolerance, begun[:, None], -np.inf).max(axis=0)
        end[self.releases] = np.where((used > self.cap) & (self.own > 0), first, time)
