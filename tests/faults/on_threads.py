"""A pipeline on threads with traps in its stages, and what must be so after one was sprung."""

from __future__ import annotations

from typing import Any

import pytest
from deadlines import TIMEOUT
from faults.traps import Boom, Trap, batch, differing, plain_gradients, trapped
from torch import nn

import penstock
from penstock.errors import PeerFailure

mse = nn.functional.mse_loss


M = 4


def pipeline(family: str = "1f1b", stages: int = 3, ranks: int = 3, **options: Any) -> penstock.Pipeline:
    options = {"loss_fn": mse, "microbatches": M, "timeout": TIMEOUT, "seed": 3, **options}
    return penstock.Pipeline(trapped(stages), schedule=family, ranks=ranks, transport="threads", **options)


def fail(pipe: penstock.Pipeline, **options: Any) -> PeerFailure:
    x, y = batch()
    with pytest.raises(PeerFailure) as caught:
        pipe.step(x, target=y, **options)
    return caught.value


def assert_clean(pipe: penstock.Pipeline, **expected: Any) -> None:
    """No half gradient is there, and the next step is that of the plain loop, bit for bit."""
    assert [name for name, parameter in pipe.named_parameters() if parameter.grad is not None] == []
    x, y = batch()
    for part in pipe.deployment.staged.parts:
        if isinstance(trap := part.module[3], Trap):  # type: ignore[index]
            trap.reset()
    result = pipe.step(x, target=y)
    assert differing(pipe, plain_gradients(pipe.deployment.staged.stages, M)) == []
    assert len(result.losses) == M
    pipe.zero_grad()


def assert_told(failure: PeerFailure, pipe: penstock.Pipeline, stage: int, ops: str, microbatch: int) -> None:
    """Where, why, and what everybody was doing."""
    rank = pipe.schedule.placement.rank_of(stage)
    assert (failure.rank, failure.stage, failure.microbatch) == (rank, stage, microbatch)
    assert failure.action in [f"{stage}{op}{microbatch}" for op in ops]
    assert failure.cause == "Boom: the trap was sprung"
    assert failure.original_traceback is not None
    assert "in boom" in failure.original_traceback
    assert isinstance(failure.__cause__, Boom)
    assert failure.report is not None
    for number in range(pipe.schedule.ranks):
        assert f"rank {number}: " in failure.report
    text = str(failure)
    assert f"rank {rank} failed (stage {stage}" in text
    assert "the trap was sprung" in text
