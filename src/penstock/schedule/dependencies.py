"""What must precede an action: the only such rule in the project.

The rule is about three values that each stage makes for each microbatch:

    OUTPUT     made by F; read by F of every consuming stage and by the stage's own B or I
    GRADIENT   of the stage's inputs, made by B or I; read by B or I of every producing stage,
               and by the stage's own W
    WEIGHT     the parameters' gradient, made by B or W

It never depends on the microbatch's number, so a `Table` evaluates it once for each
(op, stage) and the passes then work on whole numbers: that is what lets millions of actions
be aligned, proved and simulated in seconds of plain Python. A value is tracked *on a rank*:
where it was made and where a link carries it. A GRADIENT away from home is tracked for each
producing stage apart: two stages of one rank that feed the same consumer each get a message of
their own, and the one's does not serve the other.

`walk` is the one loop that runs actions as their needs are met. Align, simulate and verify
all drive it, so there is one notion of "ready" and one report of who is stuck and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.placement import Placement
from penstock.schedule.topology import Topology

__all__ = ["Stuck", "Table", "Value", "makes", "needs", "walk"]

Row = Sequence[Action | None]


class Value(IntEnum):
    """What a stage makes for a microbatch."""

    OUTPUT = 0
    GRADIENT = 1
    WEIGHT = 2


def needs(op: Op, stage: int, topology: Topology) -> tuple[tuple[Value, int], ...]:
    """The (value, stage) pairs that must exist, for the same microbatch, before the compute."""
    if op is Op.F:
        return tuple((Value.OUTPUT, producer) for producer in topology.producers(stage))
    if op in (Op.B, Op.I):
        gradients = tuple((Value.GRADIENT, consumer) for consumer in topology.consumers(stage))
        return ((Value.OUTPUT, stage), *gradients)
    if op is Op.W:
        return ((Value.GRADIENT, stage),)
    return ()


def makes(op: Op) -> tuple[Value, ...]:
    """The values of its own stage and microbatch that exist once the compute is done."""
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
        """Where microbatch 0 of a value on a rank stands, for a stage there that reads it."""
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
        """(value, stage, rank, microbatch) of a position."""
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

    def needs_of(self, action: Action) -> list[int]:
        """The positions that an action waits for; of a pair, what either part waits for.

        The parts may run at the same time: what one makes cannot be what the other needs.
        """
        waits: list[int] = []
        for stage, op, microbatch, _, _ in action.parts():
            if microbatch is not None:
                waits += [base + microbatch for base in self.needed[op][stage]]
        return waits


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


def walk(rows: Sequence[Row], table: Table, stuck: list[Stuck]) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, position, action) in an order in which every action's needs are met.

    Each rank goes through its own row in order; a value counts as carried to other ranks the
    moment it is made. Transfers and sharding are passed over: their own rules are verify's.
    Ranks that cannot finish are appended to `stuck`.
    """
    done = bytearray(table.size)
    needed, made, carried = table.needed, table.made, table.carried
    waiting: dict[int, list[int]] = {}
    cursors = [0] * len(rows)
    ready = list(range(len(rows) - 1, -1, -1))
    last_compute, first_pair = Op.W, Op.OVERLAP_F_B  # an enum's members are slow to look up
    while ready:
        rank = ready.pop()
        row = rows[rank]
        for position in range(cursors[rank], len(row)):
            action = row[position]
            if action is None or last_compute < action[1] < first_pair:
                continue
            missing = -1
            if action[4] is None:
                stage, op, microbatch = action[0], action[1], action[2]
                for base in needed[op][stage]:
                    if not done[base + microbatch]:
                        missing = base + microbatch
                        break
            else:
                missing = next((key for key in table.needs_of(action) if not done[key]), -1)
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                cursors[rank] = position
                break
            yield rank, position, action
            for stage, op, microbatch, _, _ in (action,) if action[4] is None else action[4]:
                for base in made[op][stage]:
                    key = base + microbatch
                    done[key] = 1
                    if key in waiting:
                        ready += waiting.pop(key)
                for _, base in carried[op][stage]:
                    key = base + microbatch
                    done[key] = 1
                    if key in waiting:
                        ready += waiting.pop(key)
        else:
            cursors[rank] = len(row)
    for key, ranks in waiting.items():
        value, stage, _, microbatch = table.name(key)
        for rank in ranks:
            action = rows[rank][cursors[rank]]
            if action is not None:
                stuck.append(Stuck(rank, cursors[rank], action, value, stage, microbatch))
