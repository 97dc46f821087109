"""When each action ran, on which rank: predicted by the simulator or measured by a run.

One type for both, so that a prediction and a measurement can be laid over each other and
every view, account and calibration reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import NamedTuple

from penstock.schedule.action import Action, Op
from penstock.schedule.dependencies import Value, makes, needs
from penstock.schedule.schedule import Schedule

__all__ = ["Span", "Timeline", "Wall"]

WAITED = 0.05  # of the mean span: a shorter measured wait is what it costs to take what had come


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


class Wall(NamedTuple):
    """One rank's step by the clock on the wall, measured.

    start      the end of the recorded step before it; of the first one, the call of `step`
    end        this rank had done and sent everything
    done       every rank had said so
    optimizer  seconds in optimizers' steps, between `start` and the first action
    """

    start: float
    end: float
    done: float
    optimizer: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, rank by rank in order of time, and what follows from them."""

    schedule: Schedule
    spans: tuple[Span, ...]
    peak_activations: tuple[int, ...] = ()  # microbatch-stages in flight, by rank
    peak_memory: tuple[float, ...] = ()  # by rank, in the costs' unit
    chores: tuple[Span, ...] = ()  # measured: sends and sharding, which are no computes
    walls: tuple[Wall, ...] = ()  # measured: by rank
    clock_error: float = 0.0  # measured on several hosts: how far their clocks may still be apart
    unit: str = ""  # "s" where it was measured; a simulation has the unit of its costs
    # when a value of a stage was there for a span; without it, a value is there when it is made
    arrival: Callable[[Value, int, Span], float] | None = field(default=None, compare=False, repr=False)

    def fill(self, spans: Iterable[Span], chores: Iterable[Span] = (), walls: Iterable[Wall] = ()) -> None:
        """For who measures: put what a run did into a timeline that was handed out before."""
        for name in ("by_rank", "start", "makespan", "busy", "critical_path", "_makers", "_grain"):
            self.__dict__.pop(name, None)
        for name, found in (("spans", spans), ("chores", chores), ("walls", walls)):
            object.__setattr__(self, name, tuple(found))

    def take(self, schedule: Schedule, peak_activations: Sequence[int]) -> None:
        """For who measures: what follows is of this schedule, for another number of microbatches."""
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "peak_activations", tuple(peak_activations))
        self.fill(())

    @property
    def measured(self) -> bool:
        """Was it measured? Else it was simulated."""
        return bool(self.walls)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, the schedule included."""
        from penstock.schedule.timeline_json import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """Read what `save` wrote; ScheduleError with every fault when it is anything else."""
        from penstock.schedule.timeline_json import load

        return load(path)

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
        previous = self._previous()
        path = [max(self.spans, key=lambda span: span.end)]
        seen = {id(path[0])}
        while True:
            span = path[-1]
            before: list[tuple[float, Span]] = []
            if id(span) in previous:
                before.append((previous[id(span)].end, previous[id(span)]))
            before += [(self._there(value, maker, span), maker) for value, maker in self.needed_by(span)]
            if not before:
                return tuple(reversed(path))
            chosen = max(before, key=lambda entry: entry[0])[1]
            if id(chosen) in seen:
                return tuple(reversed(path))
            seen.add(id(chosen))
            path.append(chosen)

    def needed_by(self, span: Span) -> list[tuple[Value, Span]]:
        """What the computes of a span read, each with the span that made it; not what they make themselves."""
        found = []
        for part in span.action.parts():
            for value, stage in needs(part.op, part.stage, self.schedule.topology):
                maker = self._makers.get((value, stage, part.microbatch))
                if maker is not None and maker is not span:
                    found.append((value, maker))
        return found

    def waited_for(self, span: Span) -> Span | None:
        """The span on another rank that made what a span waited for last; None where nothing comes from elsewhere."""
        makers = [(self._there(value, maker, span), maker.end, maker) for value, maker in self.needed_by(span)]
        away = [entry for entry in makers if entry[2].rank != span.rank]
        return max(away, key=lambda entry: entry[:2])[2] if away else None

    def has_waited(self, span: Span) -> bool:
        """Did it wait for longer than taking what is there costs?"""
        return span.wait > self._grain

    @cached_property
    def _grain(self) -> float:
        return WAITED * sum(self.busy) / len(self.spans) if self.measured and self.spans else 0.0

    def _there(self, value: Value, maker: Span, span: Span) -> float:
        """When what `maker` made was there for `span`: known to a simulation, told by the wait in a run."""
        if self.arrival is not None:
            return self.arrival(value, maker.action.stage, span)
        return span.start if maker.rank != span.rank and self.has_waited(span) else maker.end

    @cached_property
    def _makers(self) -> dict[tuple[Value, int, int | None], Span]:
        return {
            (value, part.stage, part.microbatch): span
            for span in self.spans
            for part in span.action.parts()
            for value in makes(part.op)
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
