"""What a run reports of each step: figures for the metrics, and one line, redrawn on a terminal, of how it goes.

step  120/300  loss 2.3511  lr 2.71e-03  norm 0.84  38,412 tokens/s  mfu 41 %  memory 412 MB  idle 31 %  eta 1:05
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.tools.train.run.metrics import Metrics
from penstock.view.figures import visible
from penstock.view.recorded import Recorded

if TYPE_CHECKING:
    from penstock.tools.train.steps import Trained


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step."""

    step: int
    steps: int
    loss: float
    lr: float
    norm: float
    rate: float  # tokens a second
    memory: int  # bytes, of the rank that has most
    idle: float | None  # share of the last recorded step
    left: float  # seconds
    validation: float | None = None
    mfu: float | None = None  # share of the devices' peak

    def line(self) -> str:
        """Format the figures, the same on a terminal and in a file."""
        width = len(str(self.steps))
        parts = [
            f"step {self.step:>{width}}/{self.steps}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            f"norm {self.norm:.2f}",
            f"{self.rate:,.0f} tokens/s",
            *([f"mfu {100 * self.mfu:.{0 if self.mfu >= 0.1 else 1}f} %"] if self.mfu is not None else []),
            f"memory {self.memory / 1e6:,.0f} MB",
        ]
        if self.idle is not None:
            parts.append(f"idle {100 * self.idle:.0f} %")
        parts.append(f"eta {of_time(self.left)}")
        if self.validation is not None:
            parts.append(f"validation {self.validation:.4f}")
        return "  ".join(parts)


class _Console(Console):
    """rich's own would leave the program when the reader has left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Progress:
    """Where the line goes. Only rank 0 has one; other ranks have a silent one."""

    def __init__(self, stream: TextIO | None, every: int) -> None:
        self._every = every
        self._stream = stream
        self._live: Live | None = None
        self._last: StepFigures | None = None
        if stream is not None:
            self._console = _Console(file=stream, highlight=False, soft_wrap=True)
            if self._console.is_terminal and os.environ.get("TERM") != "dumb":
                self._live = Live(console=self._console, auto_refresh=False, transient=False)
                self._live.start()

    def show(self, reading: StepFigures) -> None:
        if self._stream is None:
            return
        if reading.validation is None and self._last is not None:  # stays in sight until there is a newer one
            reading = replace(reading, validation=self._last.validation)
        self._last = reading
        if self._live is not None:
            with self._while_somebody_reads():
                self._live.update(Text(reading.line(), overflow="ellipsis", no_wrap=True), refresh=True)
        elif reading.step % self._every == 0 or reading.step == reading.steps:
            self.write(reading.line())

    def write(self, text: str) -> None:
        """Write something else than a step, on lines of its own."""
        if self._stream is not None:
            with self._while_somebody_reads():
                self._console.print(Text(visible(text)))

    def close(self) -> None:
        if self._live is not None:
            with self._while_somebody_reads():
                self._live.stop()
            self._live = None

    @contextmanager
    def _while_somebody_reads(self) -> Iterator[None]:
        """Let a reader that leaves (`| head`, a closed terminal) end the lines and not the training."""
        try:
            yield
        except OSError:
            if self._stream is not None:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())  # what is left in its buffer must not fail at the end
                os.close(nowhere)
            self._stream = self._live = None


class Pace:
    """Tokens a second and the time that is left, from the last steps."""

    def __init__(self, window: int = 20) -> None:
        self._marks: list[tuple[float, int]] = [(monotonic(), 0)]
        self._window = window
        self._tokens = 0

    def step(self, tokens: int) -> None:
        self._tokens += tokens
        self._marks = [*self._marks[-self._window :], (monotonic(), self._tokens)]

    @property
    def rate(self) -> float:
        (begin, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(end - begin, 1e-9)

    @property
    def seconds(self) -> float:
        """What the last step took, with all that came after the one before it."""
        return self._marks[-1][0] - self._marks[-2][0] if len(self._marks) > 1 else 0.0

    def left(self, steps: int) -> float:
        """Estimate the seconds for that many steps more."""
        (begin, _), (end, _) = self._marks[0], self._marks[-1]
        return steps * (end - begin) / max(1, len(self._marks) - 1)


def of_time(seconds: float) -> str:
    """Format a time as 1:05 or 2:00:07; a day and more in days."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, minutes = divmod(rest // 60, 60)
    clock = f"{hours}:{minutes:02}:{rest % 60:02}" if hours or days else f"{minutes}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


def memory_now() -> int:
    """Return the bytes that this process has in memory; if it uses an accelerator, the most that tensors took there."""
    if used := sum(map(torch.accelerator.max_memory_allocated, range(torch.accelerator.device_count()))):
        return used
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Reporter:
    """Reports every step; ranks other than the first have no metrics and a silent progress.

    `utilisation` is the MFU for one token per second, where that is known.
    """

    def __init__(self, steps: int, metrics: Metrics | None, progress: Progress, utilisation: float | None) -> None:
        self.metrics, self.progress = metrics, progress
        self._steps, self._utilisation = steps, utilisation
        self._pace = Pace()
        self._idle: float | None = None

    def begin(self) -> None:
        """Time counts from here."""
        self._pace = Pace()

    def time(self, trained: Trained) -> None:
        """Time a step that has just ended."""
        self._pace.step(trained.tokens)

    def report(
        self,
        step: int,
        trained: Trained,
        memory: list[int],
        *,
        recorded: Recorded | None = None,
        validation: float | None = None,
    ) -> None:
        """Report the figures of a step that was timed; `memory` in bytes by rank."""
        pace = self._pace
        mfu = None if self._utilisation is None else self._utilisation * pace.rate
        left = pace.left(self._steps - step)
        if self.metrics is not None:
            self.metrics.write(
                step,
                **{name: getattr(trained, name) for name in ("loss", "lr", "norm")},
                validation=validation,
                tokens_per_second=round(pace.rate, 1),
                seconds=round(pace.seconds, 6),
                mfu=None if mfu is None else round(mfu, 4),
                eta=round(left, 1),
                memory=memory,
                idle=None if recorded is None else round(recorded.idle, 4),
                skipped=None if trained.updated else True,
            )
        self._idle = recorded.idle if recorded is not None else self._idle
        shown = trained.loss, trained.lr, trained.norm, pace.rate, max(memory), self._idle, left, validation, mfu
        self.progress.show(StepFigures(step, self._steps, *shown))

    def close(self) -> None:
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
