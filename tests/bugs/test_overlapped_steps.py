"""What users of `train_steps` ran into who did not do as they were told, or did two things at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import launch, on_processes
from tiers import mostly_slow
from torch import nn
from transports import ON_PROCESSES

import penstock
from penstock.errors import PenstockError, UsageError
from penstock.runtime.engine.executor import Executor
from penstock.runtime.transport.distributed.member import loop_threads

WIDTH, COUNT = 8, 4


class Watched(nn.Linear):
    """A layer that calls `before` with the number of its forward, from 1."""

    def __init__(self, before: Callable[[int, torch.Tensor], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.before, self.forwards = before, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        y = super().forward(x)
        self.before(self.forwards, y)
        return y


def make(before: Callable[[int, torch.Tensor], None] = lambda *_: None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    layers = [Watched(before) for _ in range(2)]
    return penstock.Pipeline(layers, microbatches=COUNT, loss_fn=nn.functional.mse_loss, timeout=10, **options)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))] * count


class Breaking(torch.optim.SGD):
    breaks = False

    def step(self, closure: Any = None) -> Any:
        if self.breaks:
            self.breaks = False
            raise ValueError("the optimizer breaks")
        return super().step(closure)


def go_on_all_the_same(transport: str) -> list[tuple[str, bool]]:
    """Rank 0 fails as rank 1 has ended the step; then an optimizer fails on rank 1. The user goes on each time."""

    def late(forwards: int, output: torch.Tensor) -> None:
        if pipe.rank == 0 and forwards == 4 * COUNT and not said:
            output.register_hook(breaks)

    def breaks(_: torch.Tensor) -> None:
        raise ValueError("late")

    pipe = make(late, transport=transport, schedule="1f1b")
    optimizer, said = Breaking(pipe.parameters(), lr=0.1), []
    for turn in range(4):
        optimizer.breaks = turn == 2 and pipe.rank == 1
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        try:
            list(pipe.train_steps(batches(6), optimizer))
            text = "went on"
        except PenstockError as error:
            text = str(error)
        said.append((text, all(map(torch.equal, before, pipe.parameters()))))
    pipe.close()
    return said


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_ranks_that_no_longer_belong_together_are_refused_for_good_and_left_as_they_are(transport: str) -> None:
    """They were told apart by how many steps they had completed, and each refused call updated the weights once more.

    An update that failed on the rank that was ahead made the numbers equal again, and training went on with weights
    each of which lacked another update.
    """
    for first, *others in on_processes(2, go_on_all_the_same, transport):
        assert "late" in first[0]
        for text, unchanged in others:
            assert "the ranks no longer belong together; load a checkpoint on every rank" in text
            assert unchanged


def ctrl_c_twice(transport: str) -> tuple[list[str], str]:
    """The second Ctrl-C of rank 1 comes while it puts the first into words for the others. Then both go on."""

    def press(forwards: int, _: torch.Tensor) -> None:
        if pipe.rank == 1 and forwards == COUNT + 2 and not pressed:  # forwards are undone with the step
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)

    pressed: list[bool] = []
    describe = Executor._describe

    def again(executor: Executor, error: BaseException) -> Any:
        signal.raise_signal(signal.SIGINT)
        return describe(executor, error)

    Executor._describe = again  # type: ignore[method-assign]
    pipe = make(press, transport=transport)
    x, y = batches(1)[0]
    pipe.step(x, target=y)
    pipe.zero_grad()
    said = []
    try:
        pipe.step(x, target=y)
    except (KeyboardInterrupt, PenstockError) as error:
        said = [type(error).__name__, *error.__notes__]
    Executor._describe = describe  # type: ignore[method-assign]
    result = pipe.step(x, target=y)
    pipe.close()
    return said, "none" if result.loss is None else "a loss"


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_a_second_ctrl_c_while_the_first_is_told_does_not_take_the_rank_out_of_the_step(transport: str) -> None:
    """It left without a word, with a note that the step can be run again; the others waited for it in that step."""
    for rank, (said, after) in enumerate(on_processes(2, ctrl_c_twice, transport)):
        assert said[0] == ("PeerFailure", "KeyboardInterrupt")[rank]
        assert any("it can be run again" in note for note in said)
        assert after == "a loss"


def die_in(say: Callable[[list[str]], None], step: int, clip: float | None) -> None:
    def die(forwards: int, _: torch.Tensor) -> None:
        if pipe.rank == 1 and forwards == COUNT * step + 2:
            os.kill(os.getpid(), signal.SIGKILL)

    pipe = make(die, transport="shared")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    try:
        list(pipe.train_steps(batches(6), optimizer, clip=clip))
    except PenstockError as error:
        say(error.__notes__)


@pytest.mark.parametrize(
    ("step", "clip"), mostly_slow([(0, None), (1, None), (1, 1e9), (4, None)], (1, None), (4, None))
)
def test_a_death_is_named_with_the_step_in_which_it_was(step: int, clip: float | None) -> None:
    """In the second step of a loop there is no step before it whose reports are missing, and nothing was said; in
    later ones, the step before was named. No note promises that a step can be run again with a rank that is dead.
    """
    (notes,) = launch(2, die_in, step, clip)[0].said
    assert sum(f"in step {step} of train_steps(), counted from 0" in note for note in notes) == 1
    assert not any("of train_steps(), counted from 0" in note and f"in step {step}" not in note for note in notes)
    assert not any("it can be run again" in note for note in notes)


def misuse(transport: str) -> list[str]:
    pipe, said = make(transport=transport), []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    one, other = (pipe.train_steps(batches(3), optimizer, clip=1e9) for _ in range(2))
    next(one)
    for call in (lambda: next(other), lambda: (pipe.close(), next(one))):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_two_loops_at_once_and_a_loop_over_a_closed_pipeline_are_refused_at_once(transport: str) -> None:
    """Two that were made before either had begun were both run, and blamed the user for changing parameters. After
    close(), ranks waited for each other for three timeouts, or met a closed descriptor.
    """
    for said in on_processes(2, misuse, transport):
        assert said[0].startswith("this pipeline is in a train_steps() already; they do not nest")
        assert said[1].startswith("this pipeline is closed")


def threads_left() -> list[int]:
    import gc

    gc.disable()
    found = []
    for _ in range(3):
        pipe = make(transport="distributed")
        x, y = batches(1)[0]
        pipe.step(x, target=y)
        pipe.close()
        found.append(len(loop_threads()))
    return found


def test_closing_a_pipeline_ends_its_own_connections_without_the_garbage_collector() -> None:
    """Each left a thread of gloo and its descriptors behind until Python happened to collect a cycle."""
    for found in on_processes(2, threads_left):
        assert found == [1, 1, 1]  # that of the process group
