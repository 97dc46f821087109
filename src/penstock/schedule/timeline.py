"""When each action ran, on which rank: predicted by the simulator or measured by a run.

One type for both, so that a prediction and a measurement can be laid over each other and
every view, account and calibration reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.action import Action, Op
from penstock.schedule.dependencies import Value, makes, needs
from penstock.schedule.schedule import Schedule

__all__ = ["Span", "Timeline"]


class Span(NamedTuple):
    """One action of one rank, from start to end; `wait` is how long it had waited before."""

    rank: int
    action: Action
    start: float
    end: float
    wait: float = 0.0

    @property
    def length(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, rank by rank in order of time, and what follows from them."""

    schedule: Schedule
    spans: tuple[Span, ...]
    peak_activations: tuple[int, ...] = ()  # microbatch-stages in flight, by rank
    peak_memory: tuple[float, ...] = ()  # by rank, in the costs' unit
    # when a value of a stage was there for a span; without it, a value is there when it is made
    arrival: Callable[[Value, int, Span], float] | None = field(default=None, compare=False, repr=False)

    def fill(self, spans: Iterable[Span]) -> None:
        """For who measures: put the spans of a run into a timeline that was handed out before."""
        for name in ("by_rank", "start", "makespan", "busy", "critical_path"):
            self.__dict__.pop(name, None)
        object.__setattr__(self, "spans", tuple(spans))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.schedule.ranks

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, in order of time."""
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def start(self) -> float:
        """When the first action starts."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time spent in actions, by rank."""
        return tuple(sum(span.end - span.start for span in row) for row in self.by_rank)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle share of each rank: the part of the makespan in which it does nothing."""
        if not self.makespan:
            return (0.0,) * self.ranks
        return tuple((self.makespan - busy) / self.makespan for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks together, of ranks x makespan."""
        whole = self.ranks * self.makespan
        return (whole - sum(self.busy)) / whole if whole else 0.0

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that decides the makespan, first to last.

        Each span's predecessor on it is what it had to wait for longest: the rank's own
        previous action, or the need that was there last.
        """
        if not self.spans:
            return ()
        makers, previous = self._makers(), self._previous()
        path = [max(self.spans, key=lambda span: span.end)]
        seen = {id(path[0])}
        while True:
            span = path[-1]
            before: list[tuple[float, Span]] = []
            if id(span) in previous:
                before.append((previous[id(span)].end, previous[id(span)]))
            for value, stage in needs(span.action.op, span.action.stage, self.schedule.topology):
                maker = makers.get((value, stage, span.action.microbatch))
                if maker is not None:
                    there = self.arrival and self.arrival(value, stage, span)
                    before.append((maker.end if there is None else there, maker))
            if not before:
                return tuple(reversed(path))
            chosen = max(before, key=lambda entry: entry[0])[1]
            if id(chosen) in seen:
                return tuple(reversed(path))
            seen.add(id(chosen))
            path.append(chosen)

    def _makers(self) -> dict[tuple[Value, int, int | None], Span]:
        return {
            (value, span.action.stage, span.action.microbatch): span
            for span in self.spans
            for value in makes(span.action.op)
        }

    def _previous(self) -> dict[int, Span]:
        return {id(after): before for row in self.by_rank for before, after in pairwise(row)}

    def __repr__(self) -> str:
        return f"<Timeline {len(self.spans)} spans, makespan {self.makespan:g}, idle {self.bubble:.1%}>"


def peak_in_flight(order: Iterable[Action | None]) -> int:
    """The most microbatch-stages that a rank holds at once: F takes one, B or W gives it back."""
    held = most = 0
    for action in order:
        if action is not None:
            for part in action.parts():
                if part.op is Op.F:
                    held += 1
                    most = max(most, held)
                elif part.op is Op.B or part.op is Op.W:
                    held -= 1
    return most


def peaks(rows: Sequence[Sequence[Action | None]], forward_only: bool) -> tuple[int, ...]:
    """`peak_in_flight` of each rank; without a backward a forward holds nothing when it is done."""
    return tuple(1 if forward_only else peak_in_flight(row) for row in rows)
