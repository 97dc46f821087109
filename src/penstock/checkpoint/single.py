"""`save` and `load`: a single checkpoint, complete when the call returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.directory import Single
from penstock.checkpoint.disk.manifest import MANIFEST, checkpoints_in
from penstock.checkpoint.load.loading import Loaded, SkippedLog, load_into
from penstock.checkpoint.named_tensors import Given

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


def save(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    config: Any = None,
) -> None:
    """Save one checkpoint at exactly this path; it is complete when this returns. Call it on every process.

    Args:
        path: The folder to write.
        pipe: The pipeline: its parameters, buffers and position in its random numbers.
        optimizer: One optimizer, or a list.
        step: The number of completed steps.
        scheduler: A learning rate scheduler, or anything with `state_dict()` and `load_state_dict()`.
        scaler: A `GradScaler`.
        data: Anything with `state_dict()` and `load_state_dict()`, such as a data loader that can resume.
        extra: Plain values of yours: numbers, text, lists, dicts and tensors.
        config: Plain values that describe the run.
    """
    final = Path(path).absolute()
    with Checkpointer(final.parent, async_save=False) as writer:
        writer.files = Single(final)
        writer.save(step, pipe, optimizer, scheduler=scheduler, scaler=scaler, data=data, extra=extra, config=config)


def load(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
) -> Loaded:
    """Load a checkpoint into a pipeline of any layout. Call it on every process.

    Args:
        path: A checkpoint, or a directory with several, of which the newest complete one is taken.
        pipe: The pipeline to load into.
        optimizer: One optimizer, or a list, as it was saved.
        scheduler: What was saved as `scheduler`.
        scaler: What was saved as `scaler`.
        data: What was saved as `data`.

    Returns:
        A `Loaded`; the next step to train is `loaded.step + 1`.
    """
    found = Path(path)
    newest = not (found / MANIFEST).exists() and bool(checkpoints_in(found))
    return load_into(pipe, Given(optimizer, scheduler, scaler, data), found, SkippedLog(), newest=newest)
