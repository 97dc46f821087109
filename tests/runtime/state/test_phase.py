"""A layer can ask what it runs for: which microbatch, and whether it will run or has run before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.state.phase import Phase, current_microbatch, is_checkpointing, is_recomputing


def answers() -> tuple[int | None, bool, bool]:
    return current_microbatch(), is_checkpointing(), is_recomputing()


def test_outside_of_a_pipeline_there_is_no_microbatch() -> None:
    assert answers() == (None, False, False)


def test_phases_nest_and_each_thread_has_its_own() -> None:
    elsewhere: list[Any] = []
    with Phase("checkpointing", 3):
        assert answers() == (3, True, False)
        with Phase("recomputing", 1):
            assert answers() == (1, False, True)
            thread = threading.Thread(target=lambda: elsewhere.append(answers()))
            thread.start()
            thread.join()
        assert answers() == (3, True, False)
    assert elsewhere == [(None, False, False)]
    assert answers() == (None, False, False)


def test_a_phase_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), Phase("forward", 0):
        raise KeyError
    assert current_microbatch() is None


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(answers())
        return self.linear(x)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_layers_of_a_pipeline_are_told(recompute: str) -> None:
    stages, heard = [Asks(), Asks()], set()
    with penstock.Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss, recompute=recompute) as pipe:
        for stage in stages:
            stage.register_forward_hook(lambda *_: heard.add(answers()))
        pipe.step(torch.ones(4, 3), target=torch.ones(4, 3))
    runs = {(False, False)} if recompute == "never" else {(True, False), (False, True)}
    assert heard == {(number, *run) for number in (0, 1) for run in runs}
