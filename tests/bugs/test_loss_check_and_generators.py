"""In its first step, a pipeline with ranks on devices of their own had dropout masks that changed from run to run.

The check of the loss calls the loss function in ways that nobody shall see, and puts back the random generators after
that: those of all devices. Meanwhile the ranks on other devices were drawing from theirs, and drew the same again.
Found when the losses of step 0 differed in 8 of 15 runs, and those of step 1 never.
"""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import NAMES, on_device
from tiers import mostly_slow
from torch import nn


def generators_put_back() -> list[int]:
    """How many devices' generators the check of the loss has noted, each time."""
    import torch

    import penstock
    from penstock.runtime.loss import check

    noted, global_states = [], check.global_states

    def watched() -> Any:
        found = global_states()
        noted.append(len(found[2][1]))
        return found

    def unknown_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).pow(2).mean()

    check.global_states = watched
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=unknown_loss)
    pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    return noted


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_the_check_of_the_loss_leaves_the_generators_of_other_ranks_alone(name: str) -> None:
    noted = on_device(generators_put_back, name=name).value
    assert noted
    assert set(noted) == {1}
