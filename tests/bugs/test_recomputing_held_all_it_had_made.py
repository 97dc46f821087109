"""A recomputed microbatch goes with its backward, and does not wait for Python to look for cycles."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock


def tensors_that_wait_for_the_collector(family: str, **options: Any) -> list[Tensor]:
    """Return the tensors that nobody but a cycle refers to after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x = torch.randn(8, 8)
    others: set[int] = set()  # Tensors of other tests may lose their last user meanwhile.
    with penstock.Pipeline(
        model, stages=2, microbatches=4, schedule=family, loss_fn=nn.MSELoss(), devices=None, **options
    ) as pipe:
        for number in range(4):
            if number == 2:
                gc.collect()
                gc.disable()
                others = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
            pipe.step(x, target=x)
            pipe.zero_grad()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    return [each for each in gc.garbage if isinstance(each, Tensor) and id(each) not in others]


@pytest.fixture(autouse=True)
def _collector() -> Any:
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_no_tensor_of_a_step_is_left_to_the_collector(family: str, recompute: str) -> None:
    """What ran the forward again held the graph, which held what ran the forward again: activations of all
    microbatches, of step after step, stayed until Python happened to collect, on devices too."""
    assert tensors_that_wait_for_the_collector(family, recompute=recompute) == []
