"""A pipeline schedule as a frozen value: for each rank, what it does in order.

There is no stage module, device or tensor in it, so it can be built for 256 ranks on a
laptop, compared, hashed, drawn, saved, proved and priced; the executor then runs this very
object. An entry is an `Action`, or None for an idle slot: a compute schedule is a grid
whose columns are time slots, a lowered program is a plain order with transfers in it.

The constructor only arranges; whether the schedule is any good is `verify`'s to say, all
faults at once. What cannot be told from the actions is kept beside them: the placement, how
many microbatches are meant, which stages feed which, and which lowering passes have run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from penstock.errors import Fault, NotationError, ScheduleError, UsageError
from penstock.schedule.action import Action, Op, parse
from penstock.schedule.placement import Placement
from penstock.schedule.topology import Topology

__all__ = ["Row", "Schedule"]

Row = tuple[Action | None, ...]


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """Rows of actions, one row a rank. Equal schedules have equal rows and equal meaning."""

    rows: tuple[Row, ...]
    placement: Placement
    microbatches: int
    topology: Topology
    forward_only: bool
    name: str = field(compare=False)
    passes: frozenset[str] = field(compare=False)  # "transfers", "reductions", "shards"

    def __init__(
        self,
        rows: Iterable[Iterable[Action | None]],
        *,
        placement: Placement | Iterable[int] | None = None,
        microbatches: int | None = None,
        topology: Topology | None = None,
        forward_only: bool | None = None,
        name: str = "",
        passes: Iterable[str] | None = None,
    ) -> None:
        filled = tuple(tuple(row) for row in rows)
        if not filled:
            raise ScheduleError("a schedule needs at least one row: one for each rank")
        if placement is None:
            placement = _placement_seen(filled)
        elif not isinstance(placement, Placement):
            placement = Placement(placement)
        if microbatches is None:
            microbatches = _microbatches_seen(filled)
        elif microbatches < 1:
            raise UsageError(f"microbatches must be at least 1, got {microbatches}")
        if topology is None:
            topology = Topology.chain(placement.stages, _skips_seen(filled, placement.stages))
        if topology.stages != placement.stages:
            raise UsageError(f"the topology has {topology.stages} stages and the placement {placement.stages}")
        if forward_only is None:
            forward_only = not any(part.op.is_backward for _, _, part in _parts(filled))
        for name_, value in {
            "rows": filled,
            "placement": placement,
            "microbatches": microbatches,
            "topology": topology,
            "forward_only": forward_only,
            "name": name,
            "passes": passes_seen(filled) if passes is None else frozenset(passes),
        }.items():
            object.__setattr__(self, name_, value)

    # -- reading it

    @property
    def ranks(self) -> int:
        """How many ranks it is for."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are in all."""
        return self.placement.stages

    @property
    def slots(self) -> int:
        """The number of time slots of the longest row."""
        return max(map(len, self.rows))

    def rank(self, rank: int) -> Row:
        """What `rank` does, in order; None is an idle slot."""
        if not 0 <= rank < len(self.rows):
            raise UsageError(f"there is no rank {rank}: this schedule has ranks 0 to {len(self.rows) - 1}")
        return self.rows[rank]

    def parts(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, position, action) of every action, overlapped pairs opened."""
        return _parts(self.rows)

    def __repr__(self) -> str:
        title = f"{self.name} " if self.name else ""
        return f"<Schedule {title}ranks={self.ranks} stages={self.stages} microbatches={self.microbatches}>"

    # -- deriving others from it

    def replace(self, rows: Iterable[Iterable[Action | None]] | None = None, **changes: Any) -> Schedule:
        """The same schedule with other rows or other facts; what it is meant to be stays."""
        if rows is not None:
            changes["rows"] = tuple(tuple(row) for row in rows)
        return replace(self, **changes)

    def compute(self) -> Schedule:
        """Only the computes, in the same order: no idle slots, transfers or sharding."""
        rows = (
            (action for action in row if action is not None and (action.op.is_compute or action.op.is_pair))
            for row in self.rows
        )
        return self.replace(rows, passes=frozenset())

    # -- text, files

    @classmethod
    def from_text(cls, text: str | Iterable[str], **facts: Any) -> Schedule:
        """From rows of text: `0F0 0F1 . 0B0`, one line a rank, `.` for an idle slot.

        A drawing made by `draw` is read back too. `facts` are the constructor's arguments.
        """
        from penstock.schedule.text import read_text

        return cls(read_text(text), **facts)

    def draw(self, width: int | None = None, color: bool = False) -> str:
        """A grid with a row for each rank and a column for each time slot; `.` is idle.

        `width` wraps it into bands of that many characters; `color` adds terminal colours.
        """
        from penstock.schedule.text import draw

        return draw(self, width, color)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a `.csv` file (torch's dialect) or a `.json` file (everything)."""
        from penstock.schedule.text import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str], *, check: bool = True, **facts: Any) -> Schedule:
        """Read a `.csv` or `.json` file.

        `facts` (`ranks=`, `microbatches=`, `placement=`, ...) state what the file must be for.
        With `check`, missing rows, foreign stages and out-of-range microbatches are refused
        here; without it, `verify` will list them with everything else.
        """
        from penstock.schedule.text import load

        schedule = load(path, facts)
        if check:
            faults = list(schedule.shape_faults())
            if faults:
                raise ScheduleError(faults)
        return schedule

    def shape_faults(self) -> Iterator[Fault]:
        """What makes it no schedule at all: rows, stages and microbatches that do not fit."""
        stages, microbatches = self.placement.stages, self.microbatches
        home = self.placement.by_stage
        if self.ranks != self.placement.ranks:
            yield Fault(f"{self.ranks} rows for a placement on {self.placement.ranks} ranks; give each rank one row")
        seen = set()
        for rank, row in enumerate(self.rows):
            if not any(row):
                yield Fault("the row has no action; every rank runs something", rank)
            for position, entry in enumerate(row):
                if entry is None:
                    continue
                for action in (entry,) if entry[4] is None else entry[4]:
                    stage, microbatch = action[0], action[2]
                    seen.add(stage)
                    if stage >= stages:
                        yield Fault(f"there is no stage {stage}: stages are 0 to {stages - 1}", rank, position, action)
                    elif home[stage] != rank:
                        yield Fault(f"stage {stage} lives on rank {home[stage]}", rank, position, action)
                    if microbatch is not None and microbatch >= microbatches:
                        yield Fault(
                            f"microbatch {microbatch} is out of range: there are {microbatches}, "
                            f"0 to {microbatches - 1}",
                            rank,
                            position,
                            action,
                        )
                    if action[3] is not None and action[3] >= stages:
                        yield Fault(
                            f"there is no stage {action[3]}: stages are 0 to {stages - 1}", rank, position, action
                        )
        for stage in range(stages):
            if stage not in seen:
                yield Fault(f"stage {stage} appears in no row; is the row of its rank missing?")


def _parts(rows: Sequence[Row]) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if action is not None:
                for part in action.parts():
                    yield rank, position, part


def _placement_seen(rows: Sequence[Row]) -> Placement:
    """Each stage where most of its computes stand; a stage that stands nowhere goes to rank 0."""
    places: dict[int, Counter[int]] = {}
    for rank, _, action in _parts(rows):
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


def _microbatches_seen(rows: Sequence[Row]) -> int:
    """How many microbatches most stages run forward, so that one stray number is a fault."""
    forwards: dict[int, set[int]] = {}
    for _, _, action in _parts(rows):
        if action.op is Op.F and action.microbatch is not None:
            forwards.setdefault(action.stage, set()).add(action.microbatch)
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


def _skips_seen(rows: Sequence[Row], stages: int) -> list[tuple[int, int]]:
    """Edges that transfers in the rows name; needed for files, which hold nothing else."""
    skips = set()
    for _, _, action in _parts(rows):
        if action.peer is not None:
            low, high = sorted((action.stage, action.peer))
            if high < stages:
                skips.add((low, high))
    return sorted(skips)


def actions_of(rows: Iterable[Iterable[str | None]]) -> list[list[Action | None]]:
    """Parse cells; blank means idle. Every bad cell is named at once, by row and column as in an editor."""
    faults: list[Fault] = []

    def read(cell: str | None, row: int, column: int) -> Action | None:
        if not cell or not cell.strip():
            return None
        try:
            return parse(cell.strip(), row, column)
        except NotationError as error:
            faults.extend(error.faults)
            return None

    found = [[read(cell, number, column) for column, cell in enumerate(row, 1)] for number, row in enumerate(rows, 1)]
    if faults:
        raise NotationError(faults)
    return found
