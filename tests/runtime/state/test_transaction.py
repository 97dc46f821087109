"""A step is a transaction: a failed one leaves the model as it was, and run again it gives the same bits."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deadlines import TIMEOUT
from faults.undo import WIDTH, Boom, Fault, batch, differences, fail, pipeline, state, trained
from processes import on_processes
from tiers import by_turns, mostly_slow
from torch import Tensor, nn

import penstock
from penstock.errors import PeerFailure, RunError, UsageError
from penstock.runtime.engine import rank_threads
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op
from penstock.schedule.builders import TRAINING

TWO_RANKS = {"ranks": 2, "stages": 2}
OFTEN = ("1f1b", "zb-v")


def compare(options: dict[str, Any], seed: int = 0, **how: Any) -> list[str]:
    """What is other than it should be in a run with failures."""
    with pipeline(**options) as pipe:
        wanted, _ = trained(pipe, **how)
    with pipeline(**options) as pipe:
        found, moved = trained(pipe, seed, **how)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        moved += [f"after step {step}: {name}" for name in differences(one, other)]
    return moved


@pytest.mark.parametrize("schedule", by_turns(TRAINING, fast=OFTEN))
def test_a_step_that_failed_at_any_action_can_be_run_again(schedule: str) -> None:
    ranks = 4 if schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2
    assert compare({"schedule": schedule, "ranks": ranks}, every=2) == []


@pytest.mark.parametrize(
    ("cut", "recompute"),
    mostly_slow([("replay", "never"), ("replay", "except_last"), ("graph", "always")], ("replay", "except_last")),
)
def test_whatever_the_cut(cut: str, recompute: str) -> None:
    elsewhere = recompute == "never"  # a recomputed forward draws from Python's generator once more
    assert compare({"cut": cut, "recompute": recompute, "elsewhere": elsewhere, **TWO_RANKS}, steps=3) == []


def test_the_numbers_of_a_units_own_generator_are_those_of_the_plain_loop() -> None:
    """A run on empty tensors, to learn a shape in the first step, drew from it, and all that followed was another."""
    with pipeline("replay", elsewhere=False, **TWO_RANKS) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        plain = torch.Generator().manual_seed(3)
        for _ in range(pipe.microbatches):
            torch.rand(WIDTH, generator=plain)
        for layer in pipe.kept:  # type: ignore[attr-defined]
            assert torch.equal(layer.own.get_state(), plain.get_state())


@pytest.mark.parametrize("batch_norm", ["deferred", "exact"])
def test_whatever_the_batch_norm(batch_norm: str) -> None:
    assert (
        compare(
            {"batch_options": penstock.BatchOptions(batch_norm=batch_norm), "schedule": "gpipe", **TWO_RANKS}, steps=3
        )
        == []
    )


# -- on processes


def on_ranks() -> list[str]:
    found = []
    for options, every in (
        ({"schedule": "1f1b"}, 2),
        ({"schedule": "zb-h1", "recompute": "except_last", "elsewhere": False}, 1),
        ({"cut": "replay", "transport": "distributed"}, 1),
        ({"schedule": "gpipe", "batch_options": penstock.BatchOptions(batch_norm="exact")}, 1),
    ):
        found += [f"{options}: {each}" for each in compare({**options, **TWO_RANKS}, every=every, steps=3)]
    return found + ranks_apart()


def ranks_apart() -> list[str]:
    """One rank has completed a step that another has not, as after a second Ctrl-C that came too late."""
    with pipeline(**TWO_RANKS) as pipe:
        pipe.deployment.counter.step += 1 in pipe.deployment.ranks.modules()
        x, y = batch(0)
        try:
            pipe.step(x, target=y)
        except RunError as error:
            return [] if "same number of steps (rank 0: 0, rank 1: 1)" in str(error) else [str(error)]
    return ["no error"]


@pytest.mark.slow
def test_on_processes() -> None:
    assert on_processes(2, on_ranks) == [[], []]


def on_replicas() -> list[str]:
    found = []
    for replicate in ("ddp", "fsdp"):
        mesh = penstock.mesh(pp=2, dp=2)
        options = {
            "mesh": mesh,
            "parallel_options": penstock.ParallelOptions(replicate=replicate),
            "elsewhere": False,
            **TWO_RANKS,
        }
        found += [f"{replicate}: {each}" for each in compare(options, every=2, steps=3)]
    return found


@pytest.mark.slow
def test_with_replicas_gradients_that_were_there_are_as_before() -> None:
    """They are set aside while a step runs. The note once said that the step may have added to them."""
    assert on_processes(4, on_replicas) == [[], [], [], []]


# -- what the error says


@pytest.mark.parametrize("place", ["1B0", "0B2", "1F0"])
def test_gradients_of_an_earlier_step_are_as_before(place: str) -> None:
    """They were copied only on request, and else got a part of the step that failed."""
    with pipeline(**TWO_RANKS) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        before, gradients = state(pipe), [parameter.grad for parameter in pipe.parameters()]
        note = " ".join(fail(pipe, Fault(pipe, 0, place), 1).__notes__)
        assert differences(state(pipe), before) == []
        assert all(one.grad is other for one, other in zip(pipe.parameters(), gradients, strict=True))
    assert "this step is undone" in note


def test_weights_that_the_model_itself_has_written_to_are_not_called_undone() -> None:
    """An optimizer in a hook of a gradient (not of a complete one) has no step to wait for."""
    with pipeline(**TWO_RANKS) as pipe:
        weight = next(pipe.parameters())

        @torch.no_grad()
        def update(gradient: Tensor) -> None:
            weight.sub_(gradient)

        hook = weight.register_hook(update)
        note = " ".join(fail(pipe, Fault(pipe, 0, "0B2"), 0).__notes__)
        hook.remove()
    assert "has written to 1 parameters in this step" in note
    assert "undone: gradients" not in note


# -- other ways to fail


def check_undone(
    pipe: penstock.Pipeline,
    error: type[BaseException],
    act: Callable[[], Any],
    then: Callable[[], Any] = lambda: None,
    drawn: tuple[str, ...] = (),
) -> BaseException:
    """It fails, nothing has moved, and what follows is what would have been without it."""
    with pipeline(**TWO_RANKS) as other:
        wanted, _ = trained(other, steps=2)
    before = state(pipe)
    with pytest.raises(error) as caught:
        act()
    then()
    pipe.deployment.ranks.wait_for_late_ranks()
    moved = differences(state(pipe), before)
    assert [name for name in moved if name not in drawn] == []
    found, _ = trained(pipe, steps=2)
    assert [differences(one, two) for one, two in zip(found, wanted, strict=True)] == [[], []]
    return caught.value


def boom(*_: Any) -> Any:
    raise Boom


def test_an_error_in_a_hook_of_a_parameter() -> None:
    with pipeline(**TWO_RANKS) as pipe:
        x, y = batch(0)
        hook = next(pipe.parameters()).register_hook(boom)

        def act() -> None:
            try:
                pipe.step(x, target=y)
            finally:
                hook.remove()

        check_undone(pipe, PeerFailure, act)


def test_an_error_in_the_loss() -> None:
    with pipeline(**TWO_RANKS) as pipe:
        loss, (x, y) = pipe.loss_fn, batch(0)

        def act() -> None:
            calls = []

            def fails(output: Tensor, target: Tensor) -> Tensor:
                calls.append(None)
                return loss(output, target) if len(calls) < 3 else boom()  # type: ignore[misc]

            pipe.loss_fn = fails
            try:
                pipe.step(x, target=y)
            finally:
                pipe.loss_fn = loss

        check_undone(pipe, PeerFailure, act)


class Uneven(nn.Module):
    """Returns another structure for every second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> list[Tensor]:
        self.calls += 1
        return [self.linear(x)] * (1 + self.calls % 2)


def outputs_that_do_not_fit() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), Uneven())
    loss = {
        "loss_fn": lambda output, target: nn.functional.mse_loss(output[0], target),
        "loss_options": penstock.LossOptions(per_microbatch=True),
    }
    with penstock.Pipeline(model, stages=2, microbatches=2, timeout=30.0, **loss) as pipe:  # type: ignore[arg-type]
        x, y = batch(0)
        found = []
        for call in (lambda: pipe.step(x, target=y, outputs=True), lambda: pipe.predict(x)):
            try:
                call()
                found.append("no error")
            except PeerFailure as failure:
                found += [] if "of different structure" in str(failure) else [str(failure)]
        found += [name for name, each in pipe.named_parameters() if each.grad is not None]
        tracked = dict(nn.ModuleList(pipe.deployment.ranks.modules().values()).named_buffers())
        return found + [name for name, each in tracked.items() if name.endswith("tracked") and each != 0]


def test_outputs_that_cannot_be_made_one_fail_the_step_on_every_rank() -> None:
    """They were joined when the step was over already, on the last rank, which alone raised."""
    assert outputs_that_do_not_fit() == []
    assert on_processes(2, outputs_that_do_not_fit) == [[], []]


def test_an_evaluation_that_fails() -> None:
    with pipeline(**TWO_RANKS) as pipe:
        x, y = batch(0)
        fault = Fault(pipe, 0, "1F2")

        def act() -> None:
            with fault.armed():
                pipe.evaluate(x, target=y)

        check_undone(pipe, PeerFailure, act)


def test_ctrl_c() -> None:
    with pipeline(**TWO_RANKS) as pipe:
        x, y = batch(0)

        def act() -> None:
            hook = pipe.kept[1].register_forward_hook(lambda *_: _thread.interrupt_main())  # type: ignore[attr-defined]
            try:
                pipe.step(x, target=y)
            finally:
                hook.remove()

        check_undone(pipe, KeyboardInterrupt, act)


def test_a_step_inside_of_a_step_does_not_undo_that() -> None:
    """The call is refused, and is not taken for a step of this pipeline that failed."""
    with pipeline(elsewhere=False, **TWO_RANKS) as pipe, pipeline(elsewhere=False, **TWO_RANKS) as other:
        x, y = batch(0)
        errors = []

        def hook(*_: Any) -> None:
            with pytest.raises(UsageError, match="in a step already") as caught:
                pipe.step(x, target=y)
            errors.append(caught.value)

        handle = pipe.kept[1].register_forward_hook(hook)  # type: ignore[attr-defined]
        pipe.step(x, target=y)
        handle.remove()
        other.step(x, target=y)
        assert len(errors) == 4
        assert differences(state(pipe), state(other)) == []


# -- a rank that is late to leave


class Stuck:
    """A hook that holds a rank inside of its code until it is freed, and lets it change things after that."""

    def __init__(self, layer: nn.Module) -> None:
        self.free, self.inside = threading.Event(), threading.Event()
        self.handle = layer.linear.register_forward_hook(self)  # type: ignore[union-attr, operator]

    def __call__(self, *_: Any) -> None:
        self.handle.remove()
        self.inside.set()
        self.free.wait(TIMEOUT)


def late(pipe: penstock.Pipeline) -> tuple[Stuck, Callable[[], None]]:
    """Rank 1 is in its code when the step fails on rank 0."""
    stuck = Stuck(pipe.kept[1])  # type: ignore[attr-defined]

    def fails(action: Action, context: Context) -> None:
        if str(action) == "0F1":
            stuck.inside.wait(TIMEOUT)
            limit(0.2)  # from now on it is what ends the wait for rank 1
            boom()
        context.run(action)

    def limit(seconds: float) -> None:
        for transport in pipe.deployment.ranks.transports:
            transport.timeout = seconds  # type: ignore[attr-defined]

    def act() -> None:
        x, y = batch(0)
        pipe.register(Op.F, fails)
        try:
            pipe.step(x, target=y)
        finally:
            pipe.register(Op.F, None)
            limit(TIMEOUT)

    return stuck, act


def test_what_a_rank_does_late_is_undone_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, "GRACE", 0.1)
    with pipeline(**TWO_RANKS) as pipe:
        stuck, act = late(pipe)

        def then() -> None:
            x, y = batch(0)
            for call in (lambda: pipe.step(x, target=y), pipe.state_dict, pipe.zero_grad):
                with pytest.raises(RunError, match=r"1 ranks are still running.*of a copy of the model"):
                    call()
            stuck.free.set()
            monkeypatch.setattr(rank_threads, "GRACE", TIMEOUT)

        # the generators of the whole process belong to the caller by then, who may have drawn from them too
        error = check_undone(pipe, PeerFailure, act, then, drawn=("torch", "python", "numpy"))
        assert "rank 1 is still in code of the model" in " ".join(error.__notes__)


def test_a_state_that_was_loaded_while_a_rank_was_late_is_not_taken_for_its_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_threads, "GRACE", 0.1)
    with pipeline(**TWO_RANKS) as pipe:
        stuck, act = late(pipe)
        kept = {name: value.clone() for name, value in nn.ModuleList(pipe.kept).state_dict().items()}  # type: ignore[attr-defined]
        with pytest.raises(PeerFailure):
            act()
        nn.ModuleList(pipe.kept).load_state_dict(kept)  # type: ignore[attr-defined]
        stuck.free.set()
        monkeypatch.setattr(rank_threads, "GRACE", TIMEOUT)
        with pytest.raises(RunError, match="rank 1 has only now left a step that failed earlier, and parameters"):
            pipe.zero_grad()
        pipe.zero_grad()  # said once
