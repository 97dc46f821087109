"""The face of it: names, state, arguments that do not fit, on threads."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError


def test_a_layer_that_stands_in_the_model_twice_is_in_the_pipeline_twice() -> None:
    torch.manual_seed(0)
    twice = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Linear(4, 4), twice, nn.Linear(4, 4), twice)
    pipe = penstock.Pipeline(model, stages=3, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe.predict(x), model(x).detach())


def test_autocast_of_the_caller_holds_in_the_ranks() -> None:
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe.predict(torch.randn(4, 4)).dtype is torch.bfloat16
    assert pipe.predict(torch.randn(4, 4)).dtype is torch.float32


def test_the_caller_cannot_run_two_steps_at_once() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.leave = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            self.inside.set()
            self.leave.wait(20)
            return x

    slow = Slow()
    pipe = penstock.Pipeline([nn.Linear(4, 4), slow], microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    other = threading.Thread(target=lambda: pipe.step(x, target=x))
    other.start()
    try:
        assert slow.inside.wait(20)
        with pytest.raises(UsageError, match="in a step already"):
            pipe.step(x, target=x)
    finally:
        slow.leave.set()
        other.join()
    pipe.step(x, target=x)


def test_a_pipeline_that_is_dropped_takes_its_threads_and_model_with_it() -> None:
    before = set(threading.enumerate())  # an earlier test's may end meanwhile
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    watched = [weakref.ref(stage) for stage in stages]
    pipe.close()
    assert set(threading.enumerate()) <= before
    del pipe, stages
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
