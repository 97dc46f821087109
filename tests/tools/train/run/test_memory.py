"""What a run says that it held, by kind."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.tools.train.run.memory import MemoryWatch, memory_table


def test_activations_are_those_of_the_second_step_or_not_known() -> None:
    """A run that was stopped after one step reported that step's, in which the loss is checked by further passes."""
    x = torch.randn(4, 8)
    with Pipeline(nn.Sequential(nn.Linear(8, 8)), stages=1, microbatches=2, loss_fn=F.mse_loss, example=(x,)) as pipe:
        watch = MemoryWatch(pipe, torch.optim.SGD(pipe.parameters()))

        def step() -> float | None:
            with watch.step():
                pipe.step(x, target=x)
                watch.see_gradients()
            return watch.memory().activations

        assert step() is None
        assert memory_table([watch.memory()]).splitlines()[-1].split()[-3] == "-"
        second = step()
        assert second
        assert step() == second  # later ones are not counted
