"""The schedules of one pipeline, by number of microbatches: each is chosen, lowered and proved once.

A schedule is for one number of microbatches. Where the number follows from the batch, each number that comes up has a
schedule of the same family, built and proved when it is first met. Where the order follows from the sizes of a batch's
microbatches, each new batch has a schedule of its own, proved as well; the last few are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from penstock.schedule import Schedule, verify
from penstock.schedule.builders import forward_program
from penstock.schedule.lowering.gather import gather, in_turn
from penstock.tool import tool

KEPT = 16  # schedules made for sizes
Sizes = tuple[int, ...]


class _Proved(NamedTuple):
    schedule: Schedule
    program: Schedule


class Programs:
    """`choose` gives the schedule for a number of microbatches, `lower` adds transfers and reductions to it.

    `gathering` are the stages that take their batch in one piece, in training, and (True) also in inference.
    """

    def __init__(
        self,
        schedule: Schedule,
        choose: Callable[[int], Schedule],
        lower: Callable[[Schedule], Schedule],
        gathering: Callable[[bool], Collection[int]],
    ) -> None:
        self._choose, self._lower, self._gathering = choose, lower, gathering
        self._inference: dict[int, Schedule] = {}
        self._training: dict[int, _Proved] = {}
        self._sized: dict[Sizes, _Proved] = {}
        self._take(self._counted(schedule.microbatches, schedule))

    def _take(self, proved: _Proved) -> bool:
        """Run these from here on; whether they are others than before."""
        changed = proved.schedule is not getattr(self, "schedule", None)
        self.schedule, self.program = proved
        self.microbatches = proved.schedule.microbatches
        return changed

    def _counted(self, count: int, schedule: Schedule | None = None) -> _Proved:
        if count not in self._training:
            self._training[count] = self._prove(self._choose(count) if schedule is None else schedule)
        return self._training[count]

    def _prove(self, schedule: Schedule) -> _Proved:
        """Lower a schedule and prove that it ends, before anything runs."""
        gathering = self._gathering(False)
        ordered = in_turn(schedule, gathering)
        program = gather(self._lower(ordered), gathering)
        verify(program)
        return _Proved(ordered, program)

    def successor(self, schedule: Schedule, gathering: Callable[[bool], Collection[int]]) -> Programs:
        """The programs of another cut of the same model."""
        return Programs(schedule, self._choose, self._lower, gathering)

    def take(self, count: int, sizes: Sizes | None = None) -> bool:
        """From here on, training steps have that many microbatches; whether the schedule is another than before.

        With `sizes`, one for each microbatch, their order is the best that was found for these.
        """
        proved = self._counted(count)
        if sizes is None or self._gathering(False):
            return self._take(proved)
        if sizes not in self._sized:
            searching = tool("penstock.tools.search", "an order for the sizes of a batch's microbatches")
            ordered: Schedule = searching.order_microbatches(proved.schedule, sizes)
            self._sized[sizes] = proved if ordered is proved.schedule else self._prove(ordered)
            while len(self._sized) > KEPT:
                del self._sized[next(iter(self._sized))]
        return self._take(self._sized[sizes])

    def inference(self, count: int, lower: Callable[[Schedule], Schedule]) -> Schedule:
        """The program of an evaluation with that many microbatches; `lower` adds what sharded stages need."""
        if count not in self._inference:
            program = lower(gather(forward_program(self.schedule, count), self._gathering(True)))
            verify(program)
            self._inference[count] = program
        return self._inference[count]
