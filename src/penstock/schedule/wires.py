"""What messages cost, as the program sends them: one for each value and link.

A value that several stages of a rank read goes there once, and is as large as the largest of them says.
Their gradients' sum comes back once, of the same size, when the last of them is there. The messages of one
ordered pair of ranks queue for its bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.action import Op
from penstock.schedule.costs import Costs
from penstock.schedule.dependencies import Table, Value
from penstock.schedule.schedule import Schedule
from penstock.schedule.topology import Link, links

__all__ = ["Wires"]

Wire = tuple[int, int, float, float]  # base where it arrives, number of the way, time on it, delay after that


class _Joint(NamedTuple):
    """The way back on a link that several stages read."""

    number: int
    bases: tuple[int, ...]
    way: int
    occupied: float
    delay: float


class Wires:
    """The messages of a schedule under costs.

    alone[op][stage]    what leaves with each such compute
    joined[op, stage]   what leaves with the last of several
    busy_until[way]     when an ordered pair of ranks is free again
    """

    def __init__(self, schedule: Schedule, table: Table, costs: Costs) -> None:
        self.alone: list[list[list[Wire]]] = [[[] for _ in range(schedule.stages)] for _ in range(Op.W + 1)]
        self.joined: dict[tuple[Op, int], list[_Joint]] = {}
        self._ways: dict[tuple[int, int], int] = {}
        self._missing: dict[tuple[int, int], int] = {}
        for number, link in enumerate(links(schedule.placement, schedule.topology)):
            self._enter(number, link, table, costs)
        self.busy_until = [0.0] * len(self._ways)

    def _enter(self, number: int, link: Link, table: Table, costs: Costs) -> None:
        source, here, there = link.source, link.source_rank, link.target_rank
        price = max(costs.wire(source, target) for target in link.targets)
        ahead = self._ways.setdefault((here, there), len(self._ways))
        self.alone[Op.F][source].append((table.base(Value.OUTPUT, source, there, link.target), ahead, *price))
        back = self._ways.setdefault((there, here), len(self._ways))
        bases = tuple(table.base(Value.GRADIENT, target, here, source) for target in link.targets)
        for op in (Op.B, Op.I):
            if len(bases) == 1:
                self.alone[op][link.target].append((bases[0], back, *price))
            else:
                for target in link.targets:
                    self.joined.setdefault((op, target), []).append(_Joint(number, bases, back, *price))

    def join(self, op: Op, stage: int, microbatch: int, end: float, at: list[float]) -> None:
        """A gradient of a shared link is made; with the last one, all of them go."""
        for number, bases, way, occupied, delay in self.joined[op, stage]:
            left = self._missing.get((number, microbatch), len(bases)) - 1
            self._missing[number, microbatch] = left
            if not left:
                arrival = end
                if occupied:
                    arrival = self.busy_until[way] = max(end, self.busy_until[way]) + occupied
                for base in bases:
                    at[base + microbatch] = arrival + delay
