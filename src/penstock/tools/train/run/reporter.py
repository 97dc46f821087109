"""The figures of each step, for the metrics and for the line on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.tools.train.run.metrics import Metrics
from penstock.tools.train.run.progress import Pace, Progress, StepFigures
from penstock.view.recorded import Recorded

if TYPE_CHECKING:
    from penstock.tools.train.overlapped import Trained


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
        pace, loss, lr, norm = self._pace, trained.loss, trained.lr, trained.norm
        mfu = None if self._utilisation is None else self._utilisation * pace.rate
        left = pace.left(self._steps - step)
        if self.metrics is not None:
            self.metrics.write(
                step,
                loss=loss,
                lr=lr,
                norm=norm,
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
        reading = StepFigures(
            step, self._steps, loss, lr, norm, pace.rate, max(memory), self._idle, left, validation, mfu
        )
        self.progress.show(reading)

    def close(self) -> None:
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
