"""What all ranks together make of a step that failed."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from faults.on_threads import assert_clean, fail, pipeline
from faults.traps import Boom, batch, boom, trap_of
from processes import on_processes
from torch import nn

import penstock
from penstock.errors import MessageError, PeerFailure
from penstock.runtime.engine.report import EndedStep, StepReport


def test_two_ranks_that_fail_at_once_are_both_in_the_report() -> None:
    both = threading.Barrier(2, timeout=10)

    def together() -> None:
        both.wait()
        boom()

    with pipeline("gpipe") as pipe:
        assert_clean(pipe)  # which forwards draw random numbers is known: they may run side by side now
        trap_of(pipe, 0).set("forward", 1, together)
        trap_of(pipe, 1).set("forward", 0, together)
        failure = fail(pipe)
        assert (failure.rank, failure.action) == (0, "0F1")
        assert isinstance(failure.__cause__, Boom)
        assert failure.report is not None
        lines = failure.report.splitlines()
        assert [line for line in lines if "failed: Boom" in line] == lines[1:3]
        assert_clean(pipe)


def test_a_failed_step_says_that_it_is_undone_also_where_gradients_were_there() -> None:
    with pipeline() as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        trap_of(pipe, 1).set("backward", 1)
        failure = fail(pipe)
        assert "this step is undone" in " ".join(failure.__notes__)
        pipe.zero_grad()
        assert_clean(pipe)


def test_an_error_that_cannot_be_printed_is_told_by_its_type() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    def spring() -> None:
        raise Unspeakable

    with pipeline() as pipe:
        trap_of(pipe, 1).set("forward", 1, spring)
        failure = fail(pipe)
        assert failure.cause == "Unspeakable"
        assert isinstance(failure.__cause__, Unspeakable)
        assert_clean(pipe)


def test_a_refused_report_says_how_many_steps_were_complete_and_not_only_exchanges() -> None:
    class Refusing:
        def exchange(self, value: Any) -> list[Any]:
            raise MessageError("rank 0 is in its exchange number 7, counted from 0, but rank 1 in number 6")

    step = EndedStep(
        Refusing(),  # type: ignore[arg-type]
        StepReport(steps=3),
        None,
        None,
        fingerprinted=None,
        readers=None,
        computed=True,
        forget=lambda: None,
        leave=lambda: None,
    )
    with pytest.raises(MessageError) as caught:
        step.reports()
    assert caught.value.__notes__ == ["on this rank, 3 training steps of the pipeline were complete by then"]


def alone_in_a_step_that_fails() -> list[str]:
    """Rank 0 runs a second step, and the other does not."""
    x, stages = torch.randn(4, 4), [nn.Linear(4, 4), nn.Linear(4, 4)]
    with penstock.Pipeline(stages, microbatches=1, timeout=1.5, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
        if pipe.rank == 1:
            time.sleep(3)
            return []
        with pytest.raises(PeerFailure) as caught:
            pipe.step(x[:, :3], target=x)
        return [str(caught.value), *caught.value.__notes__]


def test_an_error_of_a_rank_that_others_do_not_hear_of_is_named_beside_their_silence() -> None:
    """It said that the other rank was silent, and no more."""
    (failure, *notes), _ = on_processes(2, alone_in_a_step_that_fails)
    assert failure.startswith("rank 1 ")
    assert any("rank 0 had failed by itself before that: RuntimeError: mat1 and mat2" in note for note in notes)
