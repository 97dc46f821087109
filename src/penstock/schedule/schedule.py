"""A pipeline schedule as a frozen value: for each rank, what it does in order.

There is no stage module, device or tensor in it, so it can be built for 256 ranks on a
laptop, compared, hashed, drawn, saved, proved and priced; the executor then runs this very
object. An entry is an `Action`, or None for an idle slot: a compute schedule is a grid
whose columns are time slots, a lowered program is a plain order with transfers in it.

The constructor only arranges; whether the schedule is any good is `verify`'s to say, all
faults at once. What cannot be told from the actions is kept beside them: the placement, how
many microbatches are meant, which stages feed which, which of them recompute, and which lowering
passes have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, cast

from penstock.errors import Fault, ScheduleError, UsageError
from penstock.rules import check_count, is_index
from penstock.schedule.action import Action
from penstock.schedule.placement import Placement
from penstock.schedule.seen import (
    PASSES,
    Row,
    microbatches_seen,
    parts_of,
    passes_seen,
    placement_seen,
    skips_seen,
)
from penstock.schedule.topology import Topology

__all__ = ["Row", "Schedule", "expect_schedule"]

FEW = 100_000  # missing computes that are still listed one by one


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """Rows of actions, one row a rank. Equal schedules have equal rows and equal meaning."""

    rows: tuple[Row, ...]
    placement: Placement
    microbatches: int
    topology: Topology
    forward_only: bool
    recompute: frozenset[int]  # stages whose forward runs again in their backward, so that F keeps only its input
    name: str = field(compare=False)
    passes: frozenset[str] = field(compare=False)  # "transfers", "reductions", "shards"

    def __init__(
        self,
        rows: Iterable[Iterable[Action | str | None] | str],
        *,
        placement: Placement | Iterable[int] | None = None,
        microbatches: int | None = None,
        topology: Topology | None = None,
        forward_only: bool | None = None,
        recompute: Iterable[int] = (),
        name: str = "",
        passes: Iterable[str] | None = None,
    ) -> None:
        filled = _rows_of(rows)
        if placement is None:
            placement = placement_seen(filled)
        elif not isinstance(placement, Placement):
            placement = Placement(placement)
        if microbatches is None:
            microbatches = microbatches_seen(filled)
        else:
            check_count("microbatches", microbatches)
        if topology is None:
            topology = Topology.chain(placement.stages, skips_seen(filled, placement.stages))
        if not isinstance(topology, Topology):
            raise UsageError(f"topology is a Topology, such as Topology(stages, edges); got {topology!r}")
        if topology.stages != placement.stages:
            raise UsageError(f"the topology has {topology.stages} stages and the placement {placement.stages}")
        if forward_only is None:
            forward_only = not any(part.op.is_backward for _, _, part in parts_of(filled))
        for name_, value in {
            "rows": filled,
            "placement": placement,
            "microbatches": microbatches,
            "topology": topology,
            "forward_only": forward_only,
            "recompute": _stages_of(recompute, placement.stages),
            "name": name,
            "passes": passes_seen(filled) if passes is None else _passes_of(passes),
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
        if not is_index(rank, len(self.rows)):
            raise UsageError(f"there is no rank {rank!r}: this schedule has ranks 0 to {len(self.rows) - 1}")
        return self.rows[rank]

    def parts(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, position, action) of every action, overlapped pairs opened."""
        return parts_of(self.rows)

    def __repr__(self) -> str:
        title = f"{self.name} " if self.name else ""
        return f"<Schedule {title}ranks={self.ranks} stages={self.stages} microbatches={self.microbatches}>"

    # -- deriving others from it

    def replace(self, rows: Iterable[Iterable[Action | None]] | None = None, **changes: Any) -> Schedule:
        """The same schedule with other rows or other facts; what it is meant to be stays."""
        if rows is not None:
            changes["rows"] = rows
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

        `facts` (`ranks=`, `stages=` and the constructor's arguments) state what the file must be
        for: one that says otherwise is refused. What a CSV cannot say, such as a topology, is
        taken from them. With `check`, missing rows, foreign stages and out-of-range microbatches
        are refused here; without it, `verify` will list them with everything else.
        """
        from penstock.schedule.text import load

        return load(path, facts, check)

    def shape_faults(self) -> Iterator[Fault]:
        """What makes it no schedule at all: rows, stages and microbatches that do not fit."""
        stages, microbatches = self.placement.stages, self.microbatches
        home = self.placement.by_stage
        if self.ranks != self.placement.ranks:
            yield Fault(f"{self.ranks} rows for a placement on {self.placement.ranks} ranks; give each rank one row")
        crowd = self.crowd_fault()
        if crowd is not None:
            yield crowd
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

    def crowd_fault(self) -> Fault | None:
        """Far more microbatches than the rows could ever run: one fact, said before anything of that size is made."""
        size, there = self.stages * self.microbatches, sum(map(len, self.rows))
        if size <= FEW + 2 * there:
            return None
        meant = f"{self.microbatches} microbatches in {self.stages} stages are {size} forwards"
        return Fault(f"{meant}, but the rows have only {there} entries")


def expect_schedule(value: object, call: str) -> None:
    """Refuse what is no schedule: a name, a path, rows that nobody made one of."""
    if not isinstance(value, Schedule):
        would = f"build({value!r}, ranks, microbatches)" if isinstance(value, str) else "build('1f1b', 4, 8)"
        raise UsageError(f"{call} takes a Schedule, such as {would} or Schedule.load(path); got {value!r}")


def _rows_of(rows: Iterable[Iterable[Action | str | None] | str]) -> tuple[Row, ...]:
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
    from penstock.schedule.text import read_cells

    return tuple(map(tuple, read_cells(filled)))


def _cells_of(row: Iterable[Action | str | None] | str) -> tuple[Action | str | None, ...]:
    if not isinstance(row, Iterable):
        raise UsageError(f"a row is a list of actions, such as ['0F0', '0B0']; got {row!r}")
    return tuple(row.split() if isinstance(row, str) else row)


_CELLS = frozenset((Action, type(None)))


def _stages_of(recompute: Iterable[int], stages: int) -> frozenset[int]:
    try:
        found = frozenset(recompute)
    except TypeError:
        raise UsageError(f"recompute is a list of stages, such as [0, 1]; got {recompute!r}") from None
    odd = [stage for stage in found if not is_index(stage, stages)]
    if odd:
        raise UsageError(f"recompute names stage {odd[0]!r}; the stages are 0 to {stages - 1}")
    return found


def _passes_of(passes: Iterable[str]) -> frozenset[str]:
    found = frozenset((passes,) if isinstance(passes, str) else passes)
    if isinstance(passes, str) or not found <= PASSES:
        raise UsageError(f"passes are some of {', '.join(sorted(PASSES))}, in a list or set; got {passes!r}")
    return found
