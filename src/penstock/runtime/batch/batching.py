"""How many microbatches a batch makes: the number that was asked for, or what its lengths call for.

A schedule is for one number of microbatches. Where the number follows from the batch, each number that comes up has a
schedule of the same family, built and proved when it is first met.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.group.choose_schedule import choose_schedule
from penstock.runtime.batch.feed import Feed
from penstock.runtime.batch.lengths import ByTokens
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.engine.recorder import Recorder
from penstock.schedule import Schedule
from penstock.schedule.timeline import peaks

__all__ = ["Batching"]

PROVISIONAL = 8  # microbatches, until a first batch says how many it takes


class Batching(Feed):
    """The part of `Pipeline` that is about the number of microbatches."""

    program: Schedule
    _inference: dict[int, Schedule]
    _proved: dict[int, tuple[Schedule, Schedule]]  # schedule and program, by number of microbatches
    _named: tuple[str | Schedule, int | None]  # the schedule as it was asked for, and the ranks
    _recorder: Recorder | None

    @abstractmethod
    def _prove(self, schedule: Schedule) -> None:
        """Take a schedule: lowered, and proved to end, before anything runs."""

    def _by_length(self, split: str | ByTokens, microbatches: int | None, replicated: bool) -> tuple[str, int | None]:
        """How the model is cut, and into how many microbatches a batch goes for now; keeps how batches are split."""
        if not isinstance(split, ByTokens):
            return split, microbatches
        schedule = self._named[0]
        self.batching, self._least = split, microbatches or 1
        fixed = isinstance(schedule, Schedule) or schedule.lower().endswith((".csv", ".json"))
        if split.max_tokens is not None and (fixed or replicated):
            why = "a schedule from a value or file has its number" if fixed else "replicas must have one number"
            raise UsageError(
                f"by_tokens({split.max_tokens}) makes as many microbatches as a batch needs, but {why}; "
                f"leave max_tokens out, or name the schedule"
            )
        return "auto", microbatches or (None if fixed or split.max_tokens is None else PROVISIONAL)

    def microbatches_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any]
    ) -> Batch:
        """What a step would run for this batch."""
        if self.batching is not None:
            self._take(self._planned("step()", args, kwargs, loss_kwargs, training=True))
        return self._cut(self.microbatches, args, kwargs, target, loss_kwargs)

    def _take(self, count: int) -> None:
        """From here on, run that many microbatches; each number's schedule is built and proved once."""
        if count == self.microbatches:
            return
        inference, proved = self._inference, self._proved
        if count in proved:
            (self.schedule, self.program), self.microbatches = proved[count], count
        else:
            name, ranks = self._named
            self._prove(choose_schedule(name, self.split.topology, count, ranks, self.world))
            proved[count] = (self.schedule, self.program)
        self._inference, self._proved = inference, proved
        if self._recorder is not None:
            self._recorder.timeline.take(self.schedule, peaks(self.schedule.rows, self.schedule.forward_only))
