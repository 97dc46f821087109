"""What goes into a step and what comes out of it, on one rank; and what all ranks together make of the latter."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError, PeerFailure, RunError
from penstock.messages import plain
from penstock.runtime.batch.comparison import Readers, left_out
from penstock.runtime.batch.fingerprint import BatchFingerprint, GivenBatch
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.engine.recorder import Begun
from penstock.runtime.loss.check import PairCheck
from penstock.runtime.loss.shares import Shares
from penstock.runtime.transport.failure.peer_failures import with_report
from penstock.schedule import Action, Span


@dataclass
class StepInput:
    """What one step works on, on one rank."""

    batch: Batch
    shares: Shares  # of each microbatch in the batch's loss
    loss_fn: Callable[..., Any] | None = None
    join: Callable[[list[Any]], Any] | None = None  # makes one of all outputs; without it, they are not kept
    reduce: Callable[..., Any] | None = None  # what is kept of each output; gets the microbatch's loss_kwargs
    training: bool = True
    scale: float = 1.0  # of the gradients, for float16
    recompute: frozenset[int] = frozenset()  # microbatches whose forward runs again in the backward
    recompute_stages: frozenset[int] = frozenset()  # stages for which all do
    batch_dims: Mapping[str | int, Any] = field(default_factory=dict)  # where the rows of the batch's tensors are
    returns: bool = False  # the output goes back to the user's graph: there is no loss here
    output_gradients: list[list[Tensor | None]] = field(default_factory=list)  # that came from there, by microbatch
    check: PairCheck | None = None  # of the loss, in a step that needs one
    replicas: int = 1  # that work on a batch each
    steps: int | None = None  # that this rank has completed
    sampled: GivenBatch | None = None  # where ranks compare what they were given
    readers: Readers | None = None  # which ranks need an argument, where each brings its own


class Refused(NamedTuple):
    """In the place of a step's input: why this rank cannot run what it was given, for all ranks to hear."""

    error: BaseException


@dataclass
class StepReport:
    """What one rank has to say at the end of a step; every rank gets every rank's."""

    extra: dict[str, float] = field(default_factory=dict)  # named losses, summed over microbatches
    loss: float | None = None  # of the batch, from the rank of the last stage
    losses_by_number: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    is_open: bool = False  # whether the loss is right could not be checked on outputs
    failure: PeerFailure | None = None
    progress: str = ""
    rows: int | None = None  # of the batch that this rank was given
    steps: int | None = None  # that this rank has completed
    fingerprint: BatchFingerprint | None = None  # what this rank was given
    spans: list[Span] | None = None
    begun: Begun | None = None  # of a step that is recorded
    ended: float = 0.0  # when all was computed and sent
    norm: tuple[float, torch.dtype] | None = None  # of this rank's gradients, where the next update depends on all


plain.record(Begun, start=float, optimizer=float)
plain.record(Span, rank=int, action=Action, start=float, end=float, wait=float)
plain.record(
    StepReport,
    extra=dict,
    loss=float | None,
    losses_by_number=list,
    dtype=torch.dtype,
    is_open=bool,
    failure=PeerFailure | None,
    progress=str,
    rows=int | None,
    steps=int | None,
    fingerprint=tuple | None,
    spans=list | None,
    begun=Begun | None,
    ended=float,
    norm=tuple | None,
)


def failure_of(rank: int, error: BaseException, action: Action | None) -> PeerFailure:
    """An error of this rank as the others are told of it."""
    return PeerFailure(
        rank,
        _in_words(error),
        stage=None if action is None else action.stage,
        action=None if action is None else str(action),
        microbatch=None if action is None else action.microbatch,
        original_traceback="".join(traceback.format_exception(error)),
    )


def what_went_wrong(
    reports: Sequence[StepReport], batches: str = "", readers: Readers | None = None
) -> Exception | None:
    """The one error that every rank raises after a step, or None: the same everywhere, since all have all reports.

    `batches` says how the batches of the ranks differ, if they do. That is then what is wrong, whatever failed by it.
    """
    failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
    batches = _different_sizes(reports) or batches
    if not failures:
        apart = _different_steps(reports)
        if apart:
            return RunError(apart)
        fingerprints = [report.fingerprint for report in reports]
        if not batches and readers is not None and fingerprints.count(fingerprints[0]) < len(fingerprints):
            batches = left_out(fingerprints, readers)
        return ModelError(batches) if batches else None
    origins = [failed for rank, failed in failures.items() if failed.rank == rank]
    cause = (origins or list(failures.values()))[0]
    doing = [
        report.progress + (f", failed: {failed.cause}" if failed in origins else "")
        for report, failed in zip(reports, map(failures.get, range(len(reports))), strict=True)
    ]
    failure = with_report(cause, doing)
    return ModelError(f"{batches}\nin this step, {failure}") if batches else failure


def _different_sizes(reports: Sequence[StepReport]) -> str:
    """Batches that are not of one size are not one batch, even where all shapes happen to fit."""
    sizes = {rank: report.rows for rank, report in enumerate(reports) if report.rows is not None}
    if len(set(sizes.values())) < 2:
        return ""
    listed = ", ".join(f"rank {rank}: {rows} rows" for rank, rows in sizes.items())
    return f"the ranks were given batches of different size ({listed}); pass the same batch on every rank"


def _different_steps(reports: Sequence[StepReport]) -> str:
    """A step is complete on all ranks or on none, unless one was stopped by force between the others' ends and its."""
    steps = {rank: report.steps for rank, report in enumerate(reports) if report.steps is not None}
    if len(set(steps.values())) < 2:
        return ""
    listed = ", ".join(f"rank {rank}: {count}" for rank, count in steps.items())
    return (
        f"the ranks have not completed the same number of steps ({listed}), so that their gradients and random numbers "
        f"do not belong together; load a checkpoint on every rank, or make the Pipeline anew"
    )


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be printed must still be told
        return type(error).__name__
