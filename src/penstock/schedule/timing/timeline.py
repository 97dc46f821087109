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
from typing import Any, NamedTuple, Protocol

from penstock.schedule.action import Action, Op
from penstock.schedule.columns import Columns
from penstock.schedule.dependencies import Value, makes, needs
from penstock.schedule.schedule import Schedule

# Share of the mean span: a shorter measured wait is what it costs to take a message that had come.
WAITED = 0.05


class Span(NamedTuple):
    """One action of one rank in a timeline.

    Attributes:
        rank: The rank.
        action: The action.
        start: When it started.
        end: When it ended.
        wait: How long the rank had waited for it before.
    """

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


class Need(NamedTuple):
    """A value of a stage that a compute reads."""

    value: Value
    stage: int
    reader: Action


class Times(Protocol):
    """What a simulation has found, before there are spans."""

    start: float
    makespan: float
    busy: tuple[float, ...]

    def spans(self) -> tuple[Span, ...]:
        """Return the spans, rank by rank."""

    def step_ends(self, steps: int) -> list[list[float]]:
        """Return when each rank that computes ends each of so many steps."""


@dataclass(frozen=True)
class Timeline:
    """When each action of one step ran, predicted by `simulate` or measured by `Pipeline.record`.

    Attributes:
        schedule: The schedule that ran.
        spans: Every compute, with start and end.
        peak_activations: The most microbatches in flight per rank, counted once per stage.
        peak_memory: The most memory per rank, in the unit of the costs. Only predicted.
        chores: Sends and sharding, which are not computes. Only measured.
        walls: The step of each rank by the wall clock. Only measured.
        clock_error: On several hosts: how far apart their clocks may still be.
        unit: `"s"` if it was measured; a prediction has the unit of its costs.
        cores: Cores of the host that the ranks ran on. Only measured, on the CPUs of one host; otherwise 0.
        arrival: When a value had arrived for a span, where that is known.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    peak_activations: tuple[int, ...] = ()  # microbatch-stages in flight, by rank
    peak_memory: tuple[float, ...] = ()  # By rank, in the costs' unit.
    chores: tuple[Span, ...] = ()  # measured: sends and sharding, which are no computes
    walls: tuple[Wall, ...] = ()  # measured: by rank
    clock_error: float = 0.0  # measured on several hosts: how far their clocks may still be apart
    unit: str = ""  # "s" where it was measured; a simulation has the unit of its costs
    cores: int = 0  # measured on the CPUs of one host: that ranks share; 0 where it is not known
    # Times at which what a compute reads was there on a rank; without it, a value is there when it is made.
    arrival: Callable[[Need, int], float] | None = field(default=None, compare=False, repr=False)

    def fill(self, spans: Iterable[Span], chores: Iterable[Span] = (), walls: Iterable[Wall] = ()) -> None:
        """Put what a run did into a timeline that was handed out before. For code that measures.

        Args:
            spans: The computes.
            chores: Sends and sharding.
            walls: The step of each rank by the wall clock.
        """
        for name in ("by_rank", "start", "makespan", "busy", "critical_path", "_makers", "_grain"):
            self.__dict__.pop(name, None)
        for name, found in (("spans", spans), ("chores", chores), ("walls", walls)):
            object.__setattr__(self, name, tuple(found))

    @classmethod
    def simulated(cls, schedule: Schedule, times: Times, **facts: Any) -> Timeline:
        """Make a timeline that builds its spans only when they are asked for. For code that simulates.

        Args:
            schedule: The schedule.
            times: When each action starts and ends.
            **facts: Further fields of the timeline.
        """
        timeline = cls(schedule, (), **facts)
        del timeline.__dict__["spans"]
        timeline.__dict__.update(_times=times, start=times.start, makespan=times.makespan, busy=times.busy)
        return timeline

    def __getattr__(self, name: str) -> Any:  # Only names that are not in the instance yet come here.
        if name != "spans" or "_times" not in self.__dict__:
            raise AttributeError(f"a Timeline has no {name!r}")
        spans = self.__dict__["spans"] = self.__dict__["_times"].spans()
        return spans

    def step_ends(self, steps: int) -> list[list[float]]:
        """Return when each rank that computes ends each of the steps that were simulated back to back.

        Args:
            steps: How many there were.
        """
        times: Times = self.__dict__["_times"]
        return times.step_ends(steps)

    def take(self, schedule: Schedule, peak_activations: Sequence[int]) -> None:
        """Start over for another schedule, with another number of microbatches. For code that measures.

        Args:
            schedule: The schedule that runs from now on.
            peak_activations: The most microbatches in flight per rank.
        """
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "peak_activations", tuple(peak_activations))
        self.fill(())

    @property
    def measured(self) -> bool:
        """Whether it was measured; otherwise it was predicted."""
        return bool(self.walls)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as JSON, including the schedule.

        Args:
            path: The file to write.
        """
        from penstock.schedule.files.timeline_json import save

        save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """Read what `save` wrote; `ScheduleError` with every fault if it is anything else.

        Args:
            path: The file.
        """
        from penstock.schedule.files.timeline_json import load

        return load(path)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
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
        """The idle share of each rank: the part of the makespan in which it does not compute."""
        if not self.makespan:
            return (0.0,) * self.ranks
        return tuple((self.makespan - busy) / self.makespan for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together: of the number of ranks times the makespan."""
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
            before += [(self._there(need, maker, span), maker) for need, maker in self.needed_by(span)]
            if not before:
                return tuple(reversed(path))
            chosen = max(before, key=lambda entry: entry[0])[1]
            if id(chosen) in seen:
                return tuple(reversed(path))
            seen.add(id(chosen))
            path.append(chosen)

    def needed_by(self, span: Span) -> list[tuple[Need, Span]]:
        """Return what the computes of a span read, each with the span that made it.

        Args:
            span: The span that reads.
        """
        found = []
        for part in span.action.parts():
            for value, stage in needs(part.op, part.stage, self.schedule.topology):
                maker = self._makers.get((value, stage, part.microbatch))
                if maker is not None and maker is not span:
                    found.append((Need(value, stage, part), maker))
        return found

    def waited_for(self, span: Span) -> Span | None:
        """Return the span on another rank that made what a span waited for last, or `None` if nothing comes from there.

        Args:
            span: The span that waited.
        """
        makers = [(self._there(need, maker, span), maker.end, maker) for need, maker in self.needed_by(span)]
        away = [entry for entry in makers if entry[2].rank != span.rank]
        return max(away, key=lambda entry: entry[:2])[2] if away else None

    def has_waited(self, span: Span) -> bool:
        """Return whether a span waited longer than it takes to fetch a value that is already there.

        Args:
            span: The span.
        """
        return span.wait > self._grain

    @cached_property
    def _grain(self) -> float:
        return WAITED * sum(self.busy) / len(self.spans) if self.measured and self.spans else 0.0

    def _there(self, need: Need, maker: Span, span: Span) -> float:
        """Return when what `maker` made was there for `span`: a simulation knows it, and in a run the wait shows it."""
        if self.arrival is not None:
            return self.arrival(need, span.rank)
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


def peaks(columns: Columns, forward_only: bool) -> tuple[int, ...]:
    """Return the most microbatch-stages that each rank holds at once: F takes one, B or W gives it back.

    Without a backward, a forward holds nothing when it is done.
    """
    import numpy as np

    if forward_only:
        return (1,) * columns.ranks
    change = np.zeros(len(Op), dtype=np.int64)
    change[[Op.F, Op.B, Op.W]] = 1, -1, -1
    rows = np.split(change[columns.op], columns.starts[1:-1])
    return tuple(max(0, int(np.cumsum(row).max(initial=0))) for row in rows)
