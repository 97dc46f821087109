"""What rows of actions say by themselves: the facts of a schedule that nobody stated.

A file of torch's dialect holds actions and nothing else. Placement, microbatches, skip edges and passes
are read off them here; a stray number must not win against all others, so the most frequent does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.errors import Fault, NotationError, ScheduleError
from penstock.schedule.action import Action, Op, parse
from penstock.schedule.placement import Placement

__all__ = [
    "PASSES",
    "Row",
    "actions_of",
    "forwards_seen",
    "microbatches_seen",
    "parts_of",
    "passes_seen",
    "placement_seen",
    "skips_seen",
]

Row = tuple[Action | None, ...]
PASSES = frozenset(("transfers", "reductions", "shards"))


def parts_of(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action]]:
    """(rank, position, action) of every action, overlapped pairs opened."""
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is not None:
                for part in action.parts():
                    yield rank, position, part


def placement_seen(rows: Sequence[Row]) -> Placement:
    """Each stage where most of its computes stand; a stage that stands nowhere goes to rank 0."""
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
    """The microbatches that each stage runs forward."""
    forwards: dict[int, set[int]] = {}
    for _, _, action in parts_of(rows):
        if action.op is Op.F and action.microbatch is not None:
            forwards.setdefault(action.stage, set()).add(action.microbatch)
    return forwards


def microbatches_seen(rows: Sequence[Row]) -> int:
    """How many microbatches most stages run forward, so that one stray number is a fault."""
    forwards = forwards_seen(rows)
    if not forwards:
        raise ScheduleError("the schedule has no forward, so the number of microbatches is unknown; pass microbatches=")
    counts = Counter(len(numbers) for numbers in forwards.values())
    return max(counts, key=lambda count: (counts[count], count))


def passes_seen(rows: Iterable[Iterable[Action | None]]) -> frozenset[str]:
    """Which passes must have run, by the actions that they add."""
    ops = {action[1] for row in rows for action in row if action is not None}
    names = {
        "transfers": any(op.is_transfer for op in ops),
        "reductions": Op.REDUCE_GRAD in ops,
        "shards": Op.UNSHARD in ops or Op.RESHARD in ops,
    }
    return frozenset(name for name, present in names.items() if present)


def skips_seen(rows: Sequence[Row], stages: int) -> list[tuple[int, int]]:
    """Edges that transfers in the rows name; needed for files, which hold nothing else."""
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
