"""What rows of actions say by themselves: the facts of a schedule that nobody stated.

A file of torch's dialect holds actions and nothing else. Placement, microbatches, skip edges and passes
are read off them here; a stray number must not win against all others, so the most frequent does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from penstock.errors import Fault, NotationError, ScheduleError, UsageError
from penstock.schedule.action import Action, Op, parse
from penstock.schedule.placement import Placement

Row = tuple[Action | None, ...]
PASSES = frozenset(("transfers", "reductions", "shards"))


def parts_of(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, position, action) of every action, overlapped pairs opened."""
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is not None:
                for part in action.parts():
                    yield rank, position, part


def placement_seen(rows: Sequence[Row]) -> Placement:
    """Place each stage where most of its computes stand; a stage that stands nowhere goes to rank 0."""
    places: dict[int, Counter[int]] = {}
    for rank, _, action in parts_of(rows):
        places.setdefault(action.stage, Counter())[rank] += 1
    if not places:
        raise ScheduleError("the schedule has no action in any row")
    stages = max(places) + 1
    if stages > 2 * len(places) + len(rows):
        raise ScheduleError(
            f"stage numbers go up to {stages - 1}, but only {len(places)} appear: number them from 0 without gaps"
        )
    table = [places[stage].most_common(1)[0][0] if stage in places else 0 for stage in range(stages)]
    empty = sorted(set(range(max(table) + 1)) - set(table))
    if empty:
        raise ScheduleError(
            [Fault("the row has no stage of its own; every rank runs something", rank) for rank in empty]
        )
    return Placement(table)


def forwards_seen(rows: Sequence[Row]) -> dict[int, set[int]]:
    """Return the microbatches that each stage runs forward."""
    forwards: dict[int, set[int]] = {}
    for _, _, action in parts_of(rows):
        if action.op is Op.F and action.microbatch is not None:
            forwards.setdefault(action.stage, set()).add(action.microbatch)
    return forwards


def microbatches_seen(rows: Sequence[Row]) -> int:
    """Return how many microbatches most stages run forward, so that one stray number is a fault."""
    forwards = forwards_seen(rows)
    if not forwards:
        raise ScheduleError("the schedule has no forward, so the number of microbatches is unknown; pass microbatches=")
    counts = Counter(len(numbers) for numbers in forwards.values())
    return max(counts, key=lambda count: (counts[count], count))


def passes_seen(ops: frozenset[Op]) -> frozenset[str]:
    """Return which passes must have run, by the ops that they add."""
    names = {
        "transfers": any(op.is_transfer for op in ops),
        "reductions": Op.REDUCE_GRAD in ops,
        "shards": Op.UNSHARD in ops or Op.RESHARD in ops,
    }
    return frozenset(name for name, present in names.items() if present)


def skips_seen(rows: Sequence[Row], stages: int) -> list[tuple[int, int]]:
    """Return the edges that transfers in the rows name; needed for files, which hold nothing else."""
    skips = set()
    for _, _, action in parts_of(rows):
        if action.peer is not None:
            low, high = sorted((action.stage, action.peer))
            if high < stages:
                skips.add((low, high))
    return sorted(skips)


def actions_of(
    rows: Iterable[Iterable[Any]],
    idle: str = "",
    reader: Callable[[Any, int, int], Action] = parse,
) -> list[list[Action | None]]:
    """Parse cells; blank, or `idle`, means idle. Every bad cell is named at once, by row and column as in an editor."""
    faults: list[Fault] = []

    def read(cell: Any, row: int, column: int) -> Action | None:
        if cell is None or (isinstance(cell, str) and cell.strip() in ("", idle)):
            return None
        try:
            return reader(cell.strip() if isinstance(cell, str) else cell, row, column)
        except NotationError as error:
            faults.extend(error.faults)
            return None

    found = [[read(cell, number, column) for column, cell in enumerate(row, 1)] for number, row in enumerate(rows, 1)]
    if faults:
        raise NotationError(faults)
    return found


def rows_of(rows: Iterable[Iterable[Action | str | None] | str]) -> tuple[Row, ...]:
    """Make rows of actions from what a user gives: actions or their text, None or `.` for an idle slot."""
    if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)):
        raise UsageError(
            f"a schedule is a list of rows, one for each rank, such as [['0F0', '0B0'], ['1F0', '1B0']]; got {rows!r} "
            "(for lines of text, call Schedule.from_text)"
        )
    filled = tuple(_cells_of(row) for row in rows)
    if not filled:
        raise ScheduleError("a schedule needs at least one row: one for each rank")
    if all(_CELLS.issuperset(map(type, row)) for row in filled):
        return cast("tuple[Row, ...]", filled)
    for number, row in enumerate(filled):
        odd = [cell for cell in row if type(cell) not in _CELLS and not isinstance(cell, str)]
        if odd:
            raise UsageError(
                f"row {number} holds {odd[0]!r}; a row holds Actions or their text, and None or '.' for an idle slot"
            )
    from penstock.schedule.files.text import read_cells

    return tuple(map(tuple, read_cells(filled)))


def _cells_of(row: Iterable[Action | str | None] | str) -> tuple[Action | str | None, ...]:
    if not isinstance(row, Iterable):
        raise UsageError(f"a row is a list of actions, such as ['0F0', '0B0']; got {row!r}")
    return tuple(row.split() if isinstance(row, str) else row)


_CELLS = frozenset((Action, type(None)))
