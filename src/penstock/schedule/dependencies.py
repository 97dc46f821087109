"""What must precede an action: the only such rule in the project.

The rule is about three values that each stage makes for each microbatch:

    OUTPUT     made by F; read by F of every consuming stage and by the stage's own B or I
    GRADIENT   of the stage's inputs, made by B or I; read by B or I of every producing stage,
               and by the stage's own W
    WEIGHT     the parameters' gradient, made by B or W

It never depends on the microbatch's number, so a `Table` evaluates it once for each
(op, stage) and the passes then work on arrays of whole numbers: that is what lets millions of
actions be aligned, proved and simulated in seconds. A value is tracked *on a rank*:
where it was made and where a link carries it. A GRADIENT away from home is tracked for each
producing stage apart: two stages of one rank that feed the same consumer each get a message of
their own, and the one's does not serve the other.

`waits_of` says which compute waits for which; align, simulate and verify all ask it and let `events.run` go through
the rows, so there is one notion of "ready" and one report of who is stuck and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.columns import Array, Columns, blocks
from penstock.schedule.events import Waits
from penstock.schedule.placement import Placement
from penstock.schedule.topology import Topology


class Value(IntEnum):
    """What a stage makes for a microbatch."""

    OUTPUT = 0
    GRADIENT = 1
    WEIGHT = 2


def needs(op: Op, stage: int, topology: Topology) -> tuple[tuple[Value, int], ...]:
    """Return the (value, stage) pairs that must exist, for the same microbatch, before the compute."""
    if op is Op.F:
        return tuple((Value.OUTPUT, producer) for producer in topology.producers(stage))
    if op in (Op.B, Op.I):
        gradients = tuple((Value.GRADIENT, consumer) for consumer in topology.consumers(stage))
        return ((Value.OUTPUT, stage), *gradients)
    if op is Op.W:
        return ((Value.GRADIENT, stage),)
    return ()


def makes(op: Op) -> tuple[Value, ...]:
    """Return the values of its own stage and microbatch that exist once the compute is done."""
    return _MAKES.get(op, ())


_MAKES = {
    Op.F: (Value.OUTPUT,),
    Op.B: (Value.GRADIENT, Value.WEIGHT),
    Op.I: (Value.GRADIENT,),
    Op.W: (Value.WEIGHT,),
}


class Table:
    """The rule for one placement and topology, as positions in flat arrays.

    Each (value, stage, rank) that can exist, and each (GRADIENT, stage, rank, producer) away from
    home, has a `base`; microbatch m of it is at `base + m`, and `size` positions are enough for all.

    s: stage  m: microbatch
    needed[op][s]  bases that the op of stage s waits for, on its own rank
    made[op][s]    bases that it fills on its own rank
    carried[op][s] (rank, base) of each place elsewhere that needs what it makes
    """

    def __init__(self, placement: Placement, topology: Topology, microbatches: int) -> None:
        self.microbatches = microbatches
        self.stages = topology.stages
        self._home = placement.by_stage
        self._bases: dict[tuple[Value, int, int, int], int] = {}
        self.names: list[tuple[Value, int, int, int]] = []  # the key of each base, in order
        operations = range(Op.W + 1)
        blank = ((),) * topology.stages
        self.needed: list[tuple[tuple[int, ...], ...]] = [blank] * len(Op)
        self.made: list[tuple[tuple[int, ...], ...]] = [blank] * len(Op)
        self.carried: list[tuple[tuple[tuple[int, int], ...], ...]] = [blank] * len(Op)
        rank_of = placement.rank_of
        stages = range(topology.stages)
        for op in map(Op, operations):
            self.needed[op] = tuple(
                tuple(self.base(value, source, rank_of(stage), stage) for value, source in needs(op, stage, topology))
                for stage in stages
            )
            self.made[op] = tuple(
                tuple(self.base(value, stage, rank_of(stage), stage) for value in makes(op)) for stage in stages
            )
            self.carried[op] = tuple(self._elsewhere(op, stage, placement, topology) for stage in stages)

    def base(self, value: Value, stage: int, rank: int, reader: int) -> int:
        """Return where microbatch 0 of a value on a rank stands, for a stage there that reads it."""
        alone = value is Value.GRADIENT and self._home[stage] != rank
        key = (value, stage, rank, reader if alone else stage)
        found = self._bases.get(key)
        if found is None:
            found = self._bases[key] = len(self.names) * self.microbatches
            self.names.append(key)
        return found

    @property
    def size(self) -> int:
        """The number of positions in use."""
        return len(self.names) * self.microbatches

    def name(self, position: int) -> tuple[Value, int, int, int]:
        """Return (value, stage, rank, microbatch) of a position."""
        key, microbatch = divmod(position, self.microbatches)
        return (*self.names[key][:3], microbatch)

    def _elsewhere(self, op: Op, stage: int, placement: Placement, topology: Topology) -> tuple[tuple[int, int], ...]:
        home = placement.rank_of(stage)
        found = []
        for value in makes(op):
            readers = {
                Value.OUTPUT: topology.consumers(stage),
                Value.GRADIENT: topology.producers(stage),
                Value.WEIGHT: (),
            }[value]
            away = [(placement.rank_of(reader), reader) for reader in readers]
            found += [(rank, self.base(value, stage, rank, reader)) for rank, reader in away if rank != home]
        return tuple(dict.fromkeys(found))

    def positions(self, columns: Columns, bases: Sequence[Sequence[Sequence[int]]]) -> tuple[Array, Array]:
        """Return (number of the compute, position) for all computes; `bases` are those of `needed`, `made` or such a
        table.
        """
        import numpy as np

        most = max(len(found) for by_stage in bases[: Op.W + 1] for found in by_stage)
        planes = np.full((most, Op.W + 1, self.stages), -1, dtype=np.int32 if self.size < 2**31 else np.int64)
        for op, by_stage in enumerate(bases[: Op.W + 1]):
            for stage, found in enumerate(by_stage):
                planes[: len(found), op, stage] = found
        computes = np.flatnonzero(columns.op <= Op.W).astype(np.int32)
        op, stage, microbatch = columns.op[computes], columns.stage[computes], columns.microbatch[computes]
        numbers, positions = [], []
        for plane in planes:
            base = plane[op, stage]
            there = base >= 0
            numbers.append(computes[there])
            positions.append(base[there] + microbatch[there])
        return np.concatenate(numbers or [computes[:0]]), np.concatenate(positions or [computes[:0]])

    def makers(self, columns: Columns) -> Array:
        """Return, by position, the number of the first compute that makes the value; of none, that of no compute.

        A value counts as carried to other ranks the moment it is made.
        """
        import numpy as np

        found = np.full(self.size, columns.size, dtype=np.int32)
        away = [[[base for _, base in places] for places in by_stage] for by_stage in self.carried]
        for bases in (self.made, away):
            numbers, positions = self.positions(columns, bases)
            np.minimum.at(found, positions, numbers)
        return found


class Needs(NamedTuple):
    """Need i: compute `who[i]` waits for compute `on[i]`, because of the value at `position[i]` of the table."""

    who: Array
    on: Array
    position: Array


def waits_of(table: Table, columns: Columns) -> Needs:
    """Return who waits for whom, leaving out what a rank's own order sees to.

    The parts of a pair may run at the same time: what one makes cannot be what the other needs.
    """
    import numpy as np

    who, position = table.positions(columns, table.needed)
    on = table.makers(columns)[position]
    left = np.empty(len(who), dtype=bool)
    for some in blocks(len(who)):
        known, own = np.minimum(on[some], columns.size - 1), who[some]
        in_order = (columns.rank[known] == columns.rank[own]) & (columns.cell[known] < columns.cell[own])
        left[some] = (on[some] == columns.size) | ~in_order
    return Needs(who[left], on[left], position[left])


def waits_in_cells(columns: Columns, needs: Needs) -> Waits:
    """Return the same for `events.run`, without delays: a pair waits as a whole, and then makes all that it makes."""
    import numpy as np

    return Waits(columns.cell[needs.who], needs.on, np.broadcast_to(0.0, len(needs.who)))


class Stuck(NamedTuple):
    """A rank that cannot go on: its next action waits for a value that nobody will make."""

    rank: int
    position: int
    action: Action
    value: Value
    stage: int
    microbatch: int

    @property
    def maker(self) -> Action:
        """The action that would make the value (a full backward where it may also be an I)."""
        op = {Value.OUTPUT: Op.F, Value.GRADIENT: Op.B, Value.WEIGHT: Op.W}[self.value]
        return trusted(self.stage, op, self.microbatch)


def stuck_at(columns: Columns, table: Table, needs: Needs, stuck: Iterable[tuple[int, int]]) -> list[Stuck]:
    """Express what `events.run` reports of rows that cannot go on in terms of actions and values."""
    found = []
    for rank, number in stuck:
        value, stage, _, microbatch = table.name(int(needs.position[number]))
        position = int(columns.position[needs.who[number]])
        action = columns.row(rank)[position]
        assert action is not None
        found.append(Stuck(rank, position, action, value, stage, microbatch))
    return found
