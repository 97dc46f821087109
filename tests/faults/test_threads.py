"""A rank that fails, where ranks are threads: all is told, nothing is left behind, and the next step is exact."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deadlines import SOON
from faults.on_threads import M, assert_clean, assert_told, fail, mse, pipeline
from faults.traps import Boom, batch, boom, trap_of, trapped
from tiers import by_turns, mostly_slow
from torch import nn
from transports import buffering

import penstock
from penstock.errors import MessageError, ModelError, PeerFailure
from penstock.runtime.engine.computations import Computations
from penstock.schedule import FAMILIES, Op
from penstock.schedule.builders import TRAINING

# on 3 ranks; looped-bfs adds gradients in another order than the plain loop that these are compared with
STAGES = {name: 3 * FAMILIES[name].stages_per_rank for name in TRAINING if name != "looped-bfs"}


@contextmanager
def no_thread_left() -> Iterator[set[threading.Thread]]:
    """Check that the body leaves no thread behind; it is given those that other tests have left."""
    gc.collect()
    before = set(threading.enumerate())
    yield before
    gc.collect()
    deadline = time.monotonic() + SOON
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


@pytest.mark.parametrize(("family", "capacity"), by_turns(STAGES, [None, 0], fast=[("1f1b", None), ("zb-v", None)]))
def test_an_error_in_any_forward_or_backward_is_told_and_leaves_a_clean_pipeline(
    family: str, capacity: int | None
) -> None:
    stages = STAGES[family]
    with no_thread_left() as before, buffering(capacity), pipeline(family, stages) as pipe:
        assert_clean(pipe)
        for stage in sorted({0, stages // 2, stages - 1}):
            for microbatch in (0, M // 2, M - 1):
                for where, ops in (("forward", "F"), ("backward", "BI")):
                    trap_of(pipe, stage).set(where, microbatch)
                    assert_told(fail(pipe), pipe, stage, ops, microbatch)
                    if microbatch == M // 2:
                        assert_clean(pipe)
        assert_clean(pipe)
        ours = set(threading.enumerate()) - before
        assert len([thread for thread in ours if thread.name.startswith("penstock-rank")]) == 3


@pytest.mark.parametrize("family", mostly_slow(STAGES, "1f1b", "zb-h1", "zb-v"))
def test_an_error_while_weight_gradients_are_added_names_that_action(family: str) -> None:
    stages = STAGES[family]
    with pipeline(family, stages) as pipe:
        assert_clean(pipe)  # what can wait for W is known from here on
        for stage in sorted({0, stages // 2, stages - 1}):
            for microbatch in (0, M - 1):
                fired = []

                def hook(_: Any, wanted: int = microbatch, fired: list[int] = fired) -> None:
                    fired.append(len(fired))
                    if fired[-1] == wanted:
                        boom()

                handle = pipe.deployment.staged.parts[stage].module[0].weight.register_hook(hook)  # type: ignore[index, union-attr]
                try:
                    splits = any(part.op is Op.W and part.stage == stage for _, _, part in pipe.schedule.parts())
                    assert_told(fail(pipe), pipe, stage, "BW" if splits else "B", microbatch)
                finally:
                    handle.remove()
        assert_clean(pipe)


def test_an_error_in_loss_fn_is_told_from_the_last_stage() -> None:
    calls: list[int] = []

    def loss_fn(output: Any, target: Any) -> Any:
        calls.append(0)
        return boom() if len(calls) == 2 else mse(output, target)

    with pipeline(loss_fn=loss_fn) as pipe:
        assert_told(fail(pipe), pipe, 2, "F", 1)
        assert_clean(pipe)


def test_a_loss_that_is_no_scalar_is_told_like_any_other_error() -> None:
    with pipeline(loss_fn=lambda output, target: (output - target) ** 2) as pipe:
        failure = fail(pipe)
        assert isinstance(failure.__cause__, ModelError)
        assert "the loss is a tensor of shape (3, 6)" in failure.cause


def test_an_error_after_the_last_action_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are summed when all is done, while the others wait for the end of the step."""
    right = Computations.sum_losses

    def wrong(self: Computations) -> None:
        right(self)
        if self is third:
            boom()

    with pipeline() as pipe:
        third = pipe.deployment.ranks.executors[2].computations
        with monkeypatch.context() as patch:
            patch.setattr(Computations, "sum_losses", wrong)
            failure = fail(pipe)
        assert (failure.rank, failure.action) == (2, None)
        assert isinstance(failure.__cause__, Boom)
        assert_clean(pipe)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_an_error_in_a_module_hook_is_told(kind: str) -> None:
    with pipeline() as pipe:
        register = getattr(pipe.deployment.staged.parts[1].module[0], f"register_{kind}")  # type: ignore[index]
        handle = register(lambda *_: boom())
        assert_told(fail(pipe), pipe, 1, "F" if "forward" in kind else "B", 0)
        handle.remove()
        assert_clean(pipe)


@pytest.mark.parametrize("op", [Op.F, Op.B, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B])
@pytest.mark.parametrize("capacity", [None, 0])
def test_an_error_in_a_users_handler_is_told_with_its_action(op: Op, capacity: int | None) -> None:
    with buffering(capacity), pipeline() as pipe:

        def handler(action: Any, context: Any) -> None:
            if context.rank == 1 and action.microbatch == 2:
                boom()
            context.run(action)

        pipe.register(op, handler)
        failure = fail(pipe)
        assert (failure.rank, failure.microbatch) == (1, 2)
        assert failure.action is not None
        assert str(op) in failure.action
        assert isinstance(failure.__cause__, Boom)
        pipe.register(op, None)
        assert_clean(pipe)


def test_a_handler_that_overlaps_a_pair_has_the_failing_half_named() -> None:
    with pipeline("dualpipe-v", 6) as pipe:
        pairs = [part for row in pipe.program.rows for part in row if part is not None and part.op.is_pair]
        assert pairs

        def side_by_side(action: Any, context: Any) -> None:
            context.fetch(action)
            context.compute(action)

        for op in (Op.OVERLAP_F_B, Op.OVERLAP_B_F):
            pipe.register(op, side_by_side)
        half = pairs[0].parts()[1]
        trap_of(pipe, half.stage).set("forward" if half.op is Op.F else "backward", half.microbatch)
        assert_told(fail(pipe), pipe, half.stage, str(half.op), half.microbatch)
        assert_clean(pipe)


def test_a_rank_that_computes_on_and_on_hears_of_the_failure_before_it_needs_a_message() -> None:
    """gpipe runs all forwards before it waits for any message: rank 0 would hear of it after the last."""
    ran: list[int] = []

    def slow(*_: Any) -> None:
        ran.append(len(ran))
        time.sleep(0.1)

    with pipeline("gpipe", microbatches=60) as pipe:
        x, y = batch(60)
        pipe.step(x, target=y)
        pipe.zero_grad()
        trap_of(pipe, 2).set("forward", 0)
        handle = pipe.deployment.staged.parts[0].module.register_forward_hook(slow)
        with pytest.raises(PeerFailure, match="rank 2 failed"):
            pipe.step(x, target=y)
        assert len(ran) < 60
        handle.remove()


def test_a_target_that_does_not_fit_is_refused_before_anything_runs() -> None:
    with pipeline() as pipe:
        x, y = batch()
        with pytest.raises(ModelError):
            pipe.step(x, target=y[:-1])
        with pytest.raises(ModelError):
            pipe.step(x[:2], target=y[:2])
        with pytest.raises(ModelError, match="no stage takes the keyword argument 'mask'"):
            pipe.step(x, target=y, mask=x)
        assert_clean(pipe)


def test_a_target_of_a_wrong_width_fails_in_the_loss() -> None:
    with pipeline(loss_fn=nn.functional.cross_entropy) as pipe:
        x, _ = batch()
        with pytest.raises(PeerFailure) as caught:
            pipe.step(x, target=torch.full((12,), 99))
        assert (caught.value.rank, caught.value.action) == (2, "2F0")
        pipe.loss_fn = mse
        assert_clean(pipe)


def test_evaluate_fails_the_same_way_and_training_goes_on_exactly() -> None:
    with pipeline() as pipe:
        x, y = batch()
        trap_of(pipe, 1).set("forward", 1)
        with pytest.raises(PeerFailure) as caught:
            pipe.evaluate(x, target=y)
        assert_told(caught.value, pipe, 1, "F", 1)
        assert all(module.training for module in pipe.deployment.ranks.modules().values())
        assert_clean(pipe)


def test_random_numbers_of_the_step_after_a_failed_one_are_those_of_the_failed_one() -> None:
    """Dropout depends on which step it is, and a failed one does not count."""
    x, y = batch()
    found = []
    for fails in (False, True):
        with penstock.Pipeline(
            trapped(3, dropout=0.5), microbatches=M, loss_fn=mse, seed=9, transport="threads"
        ) as pipe:
            if fails:
                trap_of(pipe, 1).set("backward", 1)
                fail(pipe)
            found.append((pipe.step(x, target=y).loss, [parameter.grad for parameter in pipe.parameters()]))
    assert torch.equal(found[0][0], found[1][0])  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
def test_nothing_of_a_failed_step_stays_alive(family: str) -> None:
    stages = STAGES[family]
    with pipeline(family, stages) as pipe:
        gc.collect()
        gc.disable()  # nothing may hang in a cycle either: that could be gigabytes until someone collects
        try:
            for where in ("forward", "backward"):
                trap_of(pipe, 1).set(where, 2)
                failure = fail(pipe)
                assert failure.__cause__ is not None
                del failure
                traps = [trap_of(pipe, stage) for stage in range(stages)]
                assert [ref for trap in traps for ref in trap.seen if ref() is not None] == []
                assert sum(len(trap.seen) for trap in traps) > 5
        finally:
            gc.enable()


def interrupt(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    return timer


@pytest.mark.parametrize("stage", mostly_slow([0, 1, 2], 1))
def test_ctrl_c_ends_the_step_and_the_next_one_works(stage: int) -> None:
    with no_thread_left(), pipeline("gpipe") as pipe:
        assert_clean(pipe)
        x, y = batch()

        def spring() -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)

        trap_of(pipe, stage).set("backward", 1, spring)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(x, target=y)
        assert_clean(pipe)


def test_sys_exit_in_a_stage_leaves_as_it_would_from_a_plain_loop() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pipeline() as pipe:
        x, y = batch()
        trap_of(pipe, 1).set("forward", 1, leave)
        with pytest.raises(SystemExit) as caught:
            pipe.step(x, target=y)
        assert caught.value.code == 3
        assert_clean(pipe)


def test_a_message_that_is_not_the_due_one_fails_the_step_and_heals() -> None:
    with pipeline() as pipe:

        def handler(action: Any, context: Any) -> None:
            mailbox = context._executor.mailbox
            if context.rank == 0 and action.microbatch == 1:
                end = mailbox.ends.sending(mailbox.channel(action))
                end.ready[3] = end.ready.pop(1)
                end.send(3)
            else:
                context.run(action)

        pipe.register(Op.SEND_F, handler)
        failure = fail(pipe)
        assert failure.rank == 1
        assert "was due" in failure.cause
        assert isinstance(failure.__cause__, MessageError)
        pipe.register(Op.SEND_F, None)
        assert_clean(pipe)
