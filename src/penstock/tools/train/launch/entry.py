"""Where a launched rank begins, and what it is given.

The launcher loads this file too, and waits while ranks work. What they work with (the pipeline, models, checkpoints) is
loaded once, by the server that they are forked from.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tools.train.config.settings import TrainConfig


@dataclass(frozen=True)
class Job:
    """What a process is given; it travels to it pickled."""

    config: TrainConfig
    resume_command: str  # the command that goes on with this run
    resumed: bool = False  # there was such a run before
    launcher: int = 0  # the process that all ranks end with


def enter(job: Job) -> int:
    """Train as a launched rank; the exit code."""
    from penstock.tools.train.worker import (
        # This takes as long to load as torch in the launcher; here it is loaded.
        train_launched,
    )

    return train_launched(job)
