"""Steps of a training run that overlap: as many at a time as there is nothing else to do between.

Ranks of `Pipeline.train_steps` do not wait for each other. But a run evaluates, saves, records and looks whether it was
asked to stop, and all ranks must be at the same step for that. So the loop trains in stretches: from one such moment to
the next, and never longer than `MOST`, so that Ctrl-C is not kept waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.pipeline.batches import Call
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.run_state import RunState

MOST = 16  # steps of one stretch


class Trained(NamedTuple):
    """What is reported of one step."""

    loss: float
    norm: float
    lr: float
    tokens: int
    updated: bool


def stretch(config: TrainConfig, step: int, unrecorded: int) -> int:
    """Return how many steps after `step` may overlap; below 2, none."""
    if not config.pipeline.overlap_steps:
        return 0
    rooms = [config.training.steps - step, unrecorded, MOST]
    rooms += [every - step % every for every in (config.evaluation.every, config.checkpoint.every) if every]
    return min(rooms)


def train_overlapped(state: RunState, batches: Iterator[tuple[DataBatch, dict[str, Any]]]) -> Iterator[Trained]:
    """Train one update per batch, in steps that overlap; with each batch comes what it counts, for the loss."""
    optimizer, clip = state.optimizer, state.config.optimizer.clip
    given: list[int] = []  # tokens of steps whose results are to come
    # The rate of the next update, for groups without a rate of their own.
    rate = optimizer.param_groups[-1]["lr"]

    def calls() -> Iterator[Call]:
        for batch, share in batches:
            given.append(batch.tokens)
            yield Call("train_steps()", batch.args, batch.kwargs, batch.target, share, False, training=True)

    for result in state.pipe.train_steps(calls(), optimizer, clip=clip, scheduler=state.rate, skip_nonfinite=True):
        loss = math.nan if result.loss is None else result.loss.item()
        norm = math.nan if result.norm is None else result.norm.item()
        lr, rate = rate, optimizer.param_groups[-1]["lr"]
        yield Trained(loss, norm, lr, given.pop(0), result.updated)
