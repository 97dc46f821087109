"""A pipeline schedule as a frozen value: for each rank, what it does in order.

There is no stage module, device or tensor in it, so it can be built for 256 ranks on a
laptop, compared, hashed, drawn, saved, proved and priced; the executor then runs this very
object. An entry is an `Action`, or None for an idle slot: a compute schedule is a grid
whose columns are time slots, a lowered program is a plain order with transfers in it.

It is kept as `columns`, flat arrays that passes read and write; its `rows` of actions are made of them
when somebody looks at them.

The constructor only arranges; whether the schedule is any good is `verify`'s to say, all
faults at once. What cannot be told from the actions is kept beside them: the placement, how
many microbatches are meant, which stages feed which, which of them recompute, and which lowering
passes have run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar

from penstock.errors import UsageError
from penstock.rules import check_count, is_index
from penstock.schedule.action import Action, Op
from penstock.schedule.columns import OPS, Columns
from penstock.schedule.placement import Placement
from penstock.schedule.seen import (
    PASSES,
    Row,
    microbatches_seen,
    parts_of,
    passes_seen,
    placement_seen,
    rows_of,
    skips_seen,
)
from penstock.schedule.topology import Topology


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Schedule:
    """For each rank, its actions in order: a frozen value. Equal schedules compare and hash equal.

    Args:
        rows: One row per rank: actions, their text (`"0F0"`) or `None` for an idle slot; or one text per row.
        placement: Which rank owns which stage. By default, as the rows show.
        microbatches: Number of microbatches. By default, as the rows show.
        topology: Which stage reads which. By default, a chain, plus the skips that the rows show.
        forward_only: Whether it is for inference. By default, whether there are no backwards.
        recompute: Stages whose forward runs again in their backward.
        name: A name to print; not compared.
        passes: What lowering has already added: `"transfers"`, `"reductions"`, `"shards"`. By default, as the rows
            show.
    """

    columns: Columns  # The actions as flat arrays, for passes.
    placement: Placement
    microbatches: int
    topology: Topology
    forward_only: bool
    recompute: frozenset[int]  # stages whose forward runs again in their backward, so that F keeps only its input
    name: str = field(compare=False)
    passes: frozenset[str] = field(compare=False)  # "transfers", "reductions", "shards"
    certificate: ClassVar[Any] = None  # Set once `verify` has proved it, or `load` has found one that is for it.

    def __init__(
        self,
        rows: Iterable[Iterable[Action | str | None] | str] | Columns,
        *,
        placement: Placement | Iterable[int] | None = None,
        microbatches: int | None = None,
        topology: Topology | None = None,
        forward_only: bool | None = None,
        recompute: Iterable[int] = (),
        name: str = "",
        passes: Iterable[str] | None = None,
    ) -> None:
        filled = () if isinstance(rows, Columns) else rows_of(rows)  # Whoever passes columns states all facts.
        self.__dict__["columns"] = rows if isinstance(rows, Columns) else Columns.of(filled)
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
            forward_only = not any(op.is_backward for op in self.ops)
        for name_, value in {
            "placement": placement,
            "microbatches": microbatches,
            "topology": topology,
            "forward_only": forward_only,
            "recompute": recomputing_stages(recompute, placement.stages),
            "name": name,
            "passes": passes_seen(self.ops) if passes is None else _passes_of(passes),
        }.items():
            self.__dict__[name_] = value

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The actions of each rank, in order; `None` is an idle slot."""
        return tuple(map(self.columns.row, range(self.columns.ranks)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._meaning == other._meaning and self.columns.same_as(other.columns)

    def __hash__(self) -> int:
        columns = self.columns
        return hash((self._meaning, columns.lengths, columns.op.tobytes(), columns.microbatch.tobytes()))

    @property
    def _meaning(self) -> tuple[object, ...]:
        return (self.placement, self.microbatches, self.topology, self.forward_only, self.recompute)

    # -- reading it

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.columns.ranks

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.placement.stages

    @property
    def slots(self) -> int:
        """Number of time slots of the longest row."""
        return max(self.columns.lengths)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that there are, those of overlapped pairs' parts included."""
        import numpy as np

        return frozenset(OPS[number] for number in np.bincount(self.columns.op).nonzero()[0])

    def rank(self, rank: int) -> Row:
        """Return what a rank does, in order; `None` is an idle slot.

        Args:
            rank: The rank.
        """
        if not is_index(rank, self.ranks):
            raise UsageError(f"there is no rank {rank!r}: this schedule has ranks 0 to {self.ranks - 1}")
        return self.rows[rank]

    def parts(self) -> Iterator[tuple[int, int, Action]]:
        """Yield every action as (rank, position, action), with overlapped pairs taken apart."""
        return parts_of(self.rows)

    def __repr__(self) -> str:
        title = f"{self.name} " if self.name else ""
        return f"<Schedule {title}ranks={self.ranks} stages={self.stages} microbatches={self.microbatches}>"

    # -- deriving others from it

    def replace(self, rows: Iterable[Iterable[Action | None]] | Columns | None = None, **changes: Any) -> Schedule:
        """Make the same schedule with other rows or other facts.

        Args:
            rows: The new rows. By default, the present ones.
            **changes: Other arguments of the constructor to change.
        """
        names = ("placement", "microbatches", "topology", "forward_only", "recompute", "name", "passes")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Schedule(self.columns if rows is None else rows, **{**facts, **changes})

    def compute(self) -> Schedule:
        """Return a schedule of the computes only, in the same order, without idle slots, transfers or sharding."""
        return self.replace(self.columns.kept(self.columns.op <= Op.W), passes=frozenset())

    # -- text, files

    @classmethod
    def from_text(cls, text: str | Iterable[str], **facts: Any) -> Schedule:
        """Read a schedule from text: one line per rank, such as `0F0 0F1 . 0B0`, where `.` is an idle slot.

        A drawing made by `draw` can be read back.

        Args:
            text: The text, or its lines.
            **facts: Further arguments of the constructor.
        """
        from penstock.schedule.files.text import read_text

        return cls(read_text(text), **facts)

    def draw(self, width: int | None = None, color: bool = False) -> str:
        """Draw it as text: one row per rank, one column per time slot; `.` is idle.

        Args:
            width: Wrap into bands of that many characters.
            color: Whether to add terminal colours.
        """
        from penstock.schedule.files.drawing import draw

        return draw(self, width, color)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file.

        Args:
            path: A path that ends in `.csv` (the dialect of `torch.distributed.pipelining`) or `.json` (everything,
                the certificate included).
        """
        from penstock.schedule.files.text import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str], *, check: bool = True, **facts: Any) -> Schedule:
        """Read a `.csv` or `.json` file.

        Args:
            path: The file.
            check: Whether missing rows, unknown stages and microbatches out of range are refused here, and a file that
                was changed after it was proved. Without it, `verify` lists the faults with everything else.
            **facts: What the file must be for: `ranks=`, `stages=` and the constructor's arguments. A file that says
                otherwise is refused. What a CSV file cannot say, such as a topology, is taken from them.
        """
        from penstock.schedule.files.text import load

        return load(path, facts, check)

    def place(self, number: int) -> tuple[int, int, Action]:
        """Return a part as (rank, position, action), by its number in `columns`.

        Args:
            number: The number of the part.
        """
        columns = self.columns
        return int(columns.rank[number]), int(columns.position[number]), columns.part(number)

    def messages(self, source: int, target: int) -> tuple[Action, ...]:
        """Return what crosses from one rank to another in a lowered program, in order: the sends of `source`.

        Args:
            source: The rank that sends.
            target: The rank that receives.
        """
        for name, rank in (("source", source), ("target", target)):
            if not is_index(rank, self.ranks):
                raise UsageError(f"{name}={rank!r}: pass one of the ranks 0 to {self.ranks - 1}")
        if "transfers" not in self.passes:
            raise UsageError("the schedule has no transfers yet, so that nothing crosses: call lower(schedule) first")
        sends = [action for action in self.rows[source] if action is not None and action.op in (Op.SEND_F, Op.SEND_B)]
        return tuple(action for action in sends if self.placement.rank_of(action.other_end) == target)


def expect_schedule(value: object, call: str) -> None:
    """Refuse what is no schedule: a name, a path, rows that nobody made one of."""
    if not isinstance(value, Schedule):
        would = f"build({value!r}, ranks, microbatches)" if isinstance(value, str) else "build('1f1b', 4, 8)"
        raise UsageError(f"{call} takes a Schedule, such as {would} or Schedule.load(path); got {value!r}")


def recomputing_stages(recompute: Iterable[int], stages: int) -> frozenset[int]:
    """Return the stages that recompute; raise where there are no such stages."""
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
