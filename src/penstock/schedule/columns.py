"""The actions of a schedule as flat arrays, one element for each: what passes over millions of them read and write.

An `Action` is what people and the executor handle; as a Python object it costs a hundred bytes and every look at it a
fraction of a microsecond. Here the same actions are columns of whole numbers, rank by rank in order, with overlapped
pairs opened. Rows of actions are made from them when somebody asks.

numpy is imported inside functions, here and in the passes: `import penstock.schedule` is to stay light.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from penstock.errors import UsageError
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.seen import Row

Array = Any  # An array of numpy, which is not imported for the sake of a name.
OPS = tuple(Op)
NAMES = tuple(Op.__members__)
MOST_COMPUTES = 200_000_000  # F, I and W: some thirty gigabytes; more than that is a slip of the keyboard


def check_size(ranks: int, microbatches: int, stages_per_rank: int, most: int = MOST_COMPUTES) -> None:
    """Refuse what would fill the memory before anything could be said about it."""
    computes = 3 * ranks * microbatches * stages_per_rank
    if computes > most:
        raise UsageError(
            f"{ranks} ranks x {microbatches} microbatches x {stages_per_rank} stages per rank are {computes:,} "
            f"computes; {most:,} are the most that this takes, and fill gigabytes already; give smaller numbers"
        )


@dataclass(frozen=True, eq=False)
class Columns:
    """The parts of all actions, flat.

    lengths[rank]    cells of the row, idle slots included
    starts[rank]     where the rank's parts begin; one more at the end
    position[i]      the cell in which part i stands; the two parts of a pair share it
    stage, op, microbatch, peer [i]   the part itself; -1 where it has no microbatch or peer
    """

    lengths: tuple[int, ...]
    starts: Array
    position: Array
    stage: Array
    op: Array
    microbatch: Array
    peer: Array

    @classmethod
    def of(cls, rows: Iterable[Sequence[Action | None]]) -> Columns:
        """Make the columns of rows of actions, of which no more than one has to exist at a time."""
        import numpy as np

        fields: list[list[Array]] = [[], [], [], [], []]
        starts, lengths = [0], []
        for row in rows:
            found = _columns_of_row(row)
            for column, values in zip(fields, found, strict=True):
                column.append(values)
            starts.append(starts[-1] + len(found[0]))
            lengths.append(len(row))
        columns = []
        while fields:
            columns.append(np.concatenate(fields.pop(0)))
        position, stage, op, microbatch, peer = columns
        return cls(tuple(lengths), np.array(starts), position, stage, op, microbatch, peer)

    @property
    def ranks(self) -> int:
        """How many rows there are."""
        return len(self.lengths)

    @property
    def size(self) -> int:
        """How many parts there are."""
        return len(self.stage)

    @cached_property
    def rank(self) -> Array:
        """The rank of each part."""
        import numpy as np

        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def cell(self) -> Array:
        """By part: the number of the first part in its cell. The same for both parts of a pair."""
        import numpy as np

        numbers = np.arange(self.size, dtype=np.int32)
        second = self.second
        numbers[second] -= 1
        return numbers

    @cached_property
    def second(self) -> Array:
        """The numbers of those parts that are the second of a pair."""
        import numpy as np

        same = (self.position[1:] == self.position[:-1]) & (self.rank[1:] == self.rank[:-1])
        return np.flatnonzero(same) + 1

    def kept(self, chosen: Array) -> Columns:
        """Return only the chosen parts, in the same order and without idle slots between them."""
        import numpy as np

        if chosen.all() and sum(self.lengths) == self.size - len(self.second):
            return self
        before = np.concatenate(([0], np.cumsum(chosen)))
        starts = before[self.starts]
        new_cell = chosen.copy()
        new_cell[self.second] = False  # a pair is kept or not as a whole
        cells = np.concatenate(([0], np.cumsum(new_cell)))
        offsets = cells[self.starts]
        position = (cells[1:] - 1 - np.repeat(offsets[:-1], np.diff(self.starts)))[chosen].astype(np.int32)
        fields = (getattr(self, name)[chosen] for name in ("stage", "op", "microbatch", "peer"))
        return Columns(tuple(np.diff(offsets).tolist()), starts, position, *fields)

    def opened(self, closed: Array | None = None) -> Columns:
        """Return the same parts, each in a cell of its own, without idle slots.

        `closed` are the second parts of pairs that stay pairs.
        """
        import numpy as np

        new_cell = np.ones(self.size, dtype=np.int64)
        if closed is not None:
            new_cell[closed] = 0
        cells = np.concatenate(([0], np.cumsum(new_cell)))
        offsets = cells[self.starts]
        position = (cells[1:] - 1 - np.repeat(offsets[:-1], np.diff(self.starts))).astype(np.int32)
        lengths = tuple(np.diff(offsets).tolist())
        return Columns(lengths, self.starts, position, self.stage, self.op, self.microbatch, self.peer)

    def forward_first(self) -> Columns:
        """Return the same with the forward of each pair before the backward: what a rank holds while both run."""
        swapped = self.second[self.op[self.second] == Op.F]
        fields = []
        for name in ("stage", "op", "microbatch", "peer"):
            column = getattr(self, name).copy()
            column[swapped - 1], column[swapped] = column[swapped], column[swapped - 1]
            fields.append(column)
        return Columns(self.lengths, self.starts, self.position, *fields)

    def part(self, number: int) -> Action:
        """Return one part as an action."""
        microbatch, peer = int(self.microbatch[number]), int(self.peer[number])
        return trusted(
            int(self.stage[number]),
            OPS[self.op[number]],
            None if microbatch < 0 else microbatch,
            None if peer < 0 else peer,
        )

    def row(self, rank: int) -> Row:
        """Return the row of a rank, as actions."""
        first, last = int(self.starts[rank]), int(self.starts[rank + 1])
        stage, op, microbatch, peer, position = (
            getattr(self, name)[first:last].tolist() for name in ("stage", "op", "microbatch", "peer", "position")
        )
        new, ops = tuple.__new__, OPS
        if min(microbatch, default=0) < 0 or max(peer, default=-1) >= 0:
            microbatch = [None if number < 0 else number for number in microbatch]
            peer = [None if number < 0 else number for number in peer]
            actions = [
                new(Action, (s, ops[o], m, p, None)) for s, o, m, p in zip(stage, op, microbatch, peer, strict=True)
            ]
        else:
            actions = [new(Action, (s, ops[o], m, None, None)) for s, o, m in zip(stage, op, microbatch, strict=True)]
        if len(actions) == self.lengths[rank] and position == list(range(len(actions))):  # no idle slot and no pair
            return tuple(actions)
        cells: list[Action | None] = [None] * self.lengths[rank]
        for place, action in zip(position, actions, strict=True):
            before = cells[place]
            cells[place] = action if before is None else Action.overlap(before, action)
        return tuple(cells)

    def texts(self, rank: int, idle: str) -> list[str]:
        """Return the cells of a row in the notation of actions, without making an action; `idle` for an idle slot."""
        first, last = int(self.starts[rank]), int(self.starts[rank + 1])
        stage, op, microbatch, position = (
            getattr(self, name)[first:last].tolist() for name in ("stage", "op", "microbatch", "position")
        )
        parts = [f"{s}{NAMES[o]}{m}" for s, o, m in zip(stage, op, microbatch, strict=True)]
        plain = (self.microbatch[first:last] >= 0) & (self.peer[first:last] < 0)
        for number in (~plain).nonzero()[0].tolist():
            parts[number] = str(self.part(first + number))
        cells = [idle] * self.lengths[rank]
        for place, text in zip(position, parts, strict=True):
            cells[place] = text
        for number in (self.second[(self.second > first) & (self.second < last)] - first).tolist():
            kind = Op.OVERLAP_F_B if op[number - 1] == Op.F else Op.OVERLAP_B_F
            cells[position[number]] = f"({parts[number - 1]};{parts[number]}){kind.name}"
        return cells

    def same_as(self, other: Columns) -> bool:
        """Do both hold the same rows?"""
        import numpy as np

        names = ("starts", "position", "stage", "op", "microbatch", "peer")
        return self.lengths == other.lengths and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )


def blocks(size: int, most: int = 1 << 22) -> Iterator[slice]:
    """Yield all elements in blocks, so that what is computed on the way never takes more than a block's memory."""
    return (slice(first, min(first + most, size)) for first in range(0, size, most))


def _columns_of_row(row: Sequence[Action | None]) -> tuple[Array, ...]:
    """Return position, stage, op, microbatch and peer of each part of a row."""
    import numpy as np

    actions = [action for action in row if action is not None]
    if len(actions) == len(row):
        position = np.arange(len(row), dtype=np.int32)
    else:
        position = np.array([place for place, action in enumerate(row) if action is not None], dtype=np.int32)
    stage, op, microbatch, peer, pair = zip(*actions, strict=True) if actions else ((),) * 5
    if any(pair):
        position = np.repeat(position, [1 if both is None else 2 for both in pair])
        parts = chain.from_iterable(action.parts() for action in actions)
        stage, op, microbatch, peer, _ = zip(*parts, strict=True)
    return position, _numbers(stage), np.frombuffer(bytes(op), dtype=np.int8), _numbers(microbatch), _numbers(peer)


def _numbers(values: tuple[int | None, ...]) -> Array:
    """Return whole numbers as an array, -1 for None."""
    import numpy as np

    if None in values:
        if not any(values) and 0 not in values:
            return np.full(len(values), -1, dtype=np.int32)
        values = tuple(-1 if value is None else value for value in values)
    return np.array(values, dtype=np.int32)
