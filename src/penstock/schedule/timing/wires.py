"""What messages cost, as the program sends them: one for each value and link.

A value that several stages of a rank read goes there once, and is as large as the largest of them says.
Their gradients' sum comes back once, of the same size, when the last of them is there. The messages of one
ordered pair of ranks queue for its bandwidth: each such pair is a row of events of its own, in which a message
waits for the computes that make it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.columns import Array, Columns
from penstock.schedule.dependencies import Needs, Table, Value
from penstock.schedule.events import Waits
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.topology import links


class _Kind(NamedTuple):
    """The messages of one link in one direction that occupy it."""

    way: int  # number of the ordered pair of ranks
    bases: tuple[int, ...]  # Positions at which they arrive.
    occupied: float


class Wires:
    """The messages of a schedule under costs, beside the computes that `columns` has.

    starts, lengths    the rows of messages, as `events.run` takes them, to stand after those of the ranks
    waits              the messages' waits for computes
    """

    def __init__(self, schedule: Schedule, table: Table, columns: Columns, costs: Costs) -> None:
        import numpy as np

        self._table, self._columns = table, columns
        self._delay = np.zeros(len(table.names))
        # Indexed by name of the table: its kind of message, if it queues.
        self._message = np.full(len(table.names), -1)
        ways: dict[tuple[int, int], int] = {}
        self._kinds: list[_Kind] = []
        for link in links(schedule.placement, schedule.topology):
            here, there = link.source_rank, link.target_rank
            ahead = (table.base(Value.OUTPUT, link.source, there, link.target),)
            back = tuple(table.base(Value.GRADIENT, target, here, link.source) for target in link.targets)
            for way, bases in (((here, there), ahead), ((there, here), back)):
                occupied, delay = max(costs.wire(link.source, target, way) for target in link.targets)
                names = [base // table.microbatches for base in bases]
                self._delay[names] = delay
                if occupied:
                    self._message[names] = len(self._kinds)
                    self._kinds.append(_Kind(ways.setdefault(way, len(ways)), bases, occupied))
        self._queue(len(ways), np.array(costs.scale(schedule.microbatches)))

    def _queue(self, ways: int, scale: Array) -> None:
        """Put the messages of each way in the order in which the last compute of each is run."""
        import numpy as np

        count, size = self._table.microbatches, self._columns.size
        makers = self._table.makers(self._columns) if self._kinds else np.zeros(0, dtype=np.int32)
        numbers = np.arange(count)
        made = [np.stack([makers[base + numbers] for base in kind.bases]) for kind in self._kinds]
        last = np.concatenate([by_base.max(axis=0) for by_base in made] or [makers])
        way = np.repeat([kind.way for kind in self._kinds], count)
        joined = np.repeat([len(kind.bases) > 1 for kind in self._kinds], count)
        order = np.lexsort((joined, last, way))
        self.starts = size + np.searchsorted(way[order], np.arange(1, ways + 1))
        occupied = np.repeat([kind.occupied for kind in self._kinds], count) * np.tile(scale, len(self._kinds))
        self.lengths = occupied[order]
        self.never = size + len(order)
        self._event = np.empty(len(order), dtype=np.int64)  # Indexed by kind and microbatch.
        self._event[order] = np.arange(size, self.never)
        event = [np.tile(self._event[k * count : (k + 1) * count], len(made[k])) for k in range(len(made))]
        on = np.concatenate([by_base.ravel() for by_base in made] or [makers]).astype(np.int64)
        on[on == size] = self.never
        self.waits = Waits(np.concatenate(event or [self._event]), on, np.zeros(len(on)))

    def carried(self, needs: Needs) -> tuple[Array, Array]:
        """Return (event, delay): what brings each needed value, and how long after its end the value is there."""
        import numpy as np

        name, microbatch = np.divmod(needs.position, self._table.microbatches)
        on = needs.on.astype(np.int64)
        on[on == self._columns.size] = self.never
        kind = self._message[name]
        queues = kind >= 0
        on[queues] = self._event[kind[queues] * self._table.microbatches + microbatch[queues]]
        return on, self._delay[name]
