"""The schedules of one pipeline, by number of microbatches: each is chosen, lowered and proved once.

A schedule is for one number of microbatches. Where the number follows from the batch, each number that comes up has a
schedule of the same family, built and proved when it is first met.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from penstock.schedule import Schedule, verify
from penstock.schedule.builders import forward_program
from penstock.schedule.gather import gather, in_turn

__all__ = ["Programs"]


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
        self._take(self._prove(schedule))

    def _take(self, proved: _Proved) -> None:
        self.schedule, self.program = proved
        self.microbatches = proved.schedule.microbatches
        self._training[self.microbatches] = proved

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

    def take(self, count: int) -> bool:
        """From here on, training steps have that many microbatches; whether that is another number than before."""
        if count == self.microbatches:
            return False
        self._take(self._training.get(count) or self._prove(self._choose(count)))
        return True

    def inference(self, count: int, lower: Callable[[Schedule], Schedule]) -> Schedule:
        """The program of an evaluation with that many microbatches; `lower` adds what sharded stages need."""
        if count not in self._inference:
            self._inference[count] = lower(gather(forward_program(self.schedule, count), self._gathering(True)))
        return self._inference[count]
