"""Measures the steps inside `pipe.record()`: every rank's spans, on one clock.

Each rank reads its own monotonic clock. On one host that is the same clock for all processes.
Across hosts it is not, and a timeline of unaligned clocks would show answers before questions:
`offsets` estimates how far each rank's clock is from rank 0's.

The estimate uses nothing but `exchange`, in which no rank leaves before every rank has come.
So for any two ranks the one's arrival precedes the other's departure, in both directions; a few
rounds give an interval that must hold the offset, and its middle is taken. Half its width
bounds the error; the timeline tells it as `clock_error`.

On an accelerator the host starts kernels and goes on. There, events among the kernels have the times (`DeviceClock`).

What a step cost beside its actions is measured from the end of the step before it: whatever the
optimizer, the data and the user's loop took in between belongs to this step's wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import optimizer as optimizers

from penstock.devices import BOOT, mark
from penstock.schedule import Action, Timeline
from penstock.schedule.timing.timeline import Span, Wall

if TYPE_CHECKING:
    from penstock.runtime.engine.report import StepReport
    from penstock.runtime.transport import Transport

ROUNDS = 16


class ActionWait:
    """How long the action that runs has waited for messages, and when its last wait ended.

    `mark` records an event on the device, where kernels of the action come after what its stream waits for.
    """

    def __init__(self, mark: Callable[[], torch.Event] | None = None) -> None:
        self.seconds = 0.0
        self.ended = 0.0
        self.mark = mark
        self.event = None if mark is None else mark()

    def add(self, begin: float, end: float) -> None:
        """Count one wait."""
        self.seconds += end - begin
        self.ended = end
        if self.mark is not None:
            self.event = self.mark()


class WallStart(NamedTuple):
    """Since when a step's wall time counts, and how much of it was an optimizer's."""

    start: float
    optimizer: float


class DeviceClock:
    """Times of a step on a rank whose kernels run behind its host: those of events among the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marked: list[tuple[Action, torch.Event, torch.Event, torch.Event]] = []
        self._first = self.mark()
        self._first.synchronize()
        self._began = perf_counter()

    def mark(self) -> torch.Event:
        """Record an event behind all that was launched so far."""
        return mark(self._device)

    def add(self, action: Action, before: torch.Event, start: torch.Event) -> None:
        """An action has been launched; what it waited for lies between the two events."""
        self._marked.append((action, before, start, self.mark()))

    def spans(self, rank: int) -> list[Span]:
        """Wait for the device, and return a span for each action."""
        self.mark().synchronize()

        def time(event: torch.Event) -> float:
            return self._began + self._first.elapsed_time(event) / 1e3

        return [
            Span(rank, action, time(start), time(end), time(start) - time(before))
            for action, before, start, end in self._marked
        ]


class Recorder:
    """One use of `pipe.record()`: fills its timeline with the last step inside."""

    def __init__(self, timeline: Timeline, rank: int, shifts: Sequence[float]) -> None:
        self.timeline = timeline
        self.silent: list[int] = []  # ranks that took part in a step without recording it
        self._rank = rank  # one that lives in this process
        self._shifts = shifts  # of each rank's clock against rank 0's
        self._last: float | None = None  # when the recorded step before this one was done
        self._optimizer = 0.0
        self._began: list[float] = []

    def begin(self) -> WallStart:
        """A step begins in this process."""
        return WallStart(perf_counter() if self._last is None else self._last, self._optimizer)

    def keep(self, reports: Sequence[StepReport]) -> None:
        """A step is done: what all ranks report of it is the timeline now."""
        self._last, self._optimizer = perf_counter(), 0.0
        self.silent = [rank for rank, report in enumerate(reports) if report.wall_start is None]
        if self.silent:
            return
        spans: list[Span] = []
        chores: list[Span] = []
        walls = []
        done = self._last - self._shifts[self._rank]  # the last exchange ends here and everywhere at the same time
        for report, shift in zip(reports, self._shifts, strict=True):
            for span in report.spans or ():
                moved = span._replace(start=span.start - shift, end=span.end - shift)
                (chores if span.action.op.is_transfer or span.action.op.is_sharding else spans).append(moved)
            if report.wall_start is not None:
                end = report.ended - shift
                walls.append(Wall(report.wall_start.start - shift, end, max(done, end), report.wall_start.optimizer))
        self.timeline.fill(spans, chores, walls)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the time of every optimizer's step in this process is counted."""

        def before(*_: Any) -> None:
            self._began.append(perf_counter())

        def after(*_: Any) -> None:
            self._optimizer += perf_counter() - self._began.pop()

        hooks = [
            optimizers.register_optimizer_step_pre_hook(before),
            optimizers.register_optimizer_step_post_hook(after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def host_name() -> str:
    """Equal for processes that share a monotonic clock."""
    return BOOT.read_text().strip() if BOOT.exists() else ""


def offsets(transport: Transport, clock: Callable[[], float] = perf_counter) -> tuple[list[float], float]:
    """How far each rank's clock is ahead of rank 0's, and by how much that may be wrong. On every rank at once."""
    came, left = [], []
    for _ in range(ROUNDS):
        came.append(clock())
        transport.exchange(None)
        left.append(clock())
    answers = transport.exchange((came, left))
    first_came, first_left = answers[0]
    found, error = [0.0], 0.0
    for other_came, other_left in answers[1:]:
        most = min(there - here for there, here in zip(other_left, first_came, strict=True))
        least = max(there - here for there, here in zip(other_came, first_left, strict=True))
        found.append((most + least) / 2)
        error = max(error, (most - least) / 2)
    return found, error
