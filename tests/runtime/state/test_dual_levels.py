"""Forward-mode differentiation in stages whose ranks are threads: a process has one level of dual numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # as torch loads forward_ad's rules
WIDTH = 4


class Tangents(nn.Module):
    """Returns the directional derivative of its layer beside the layer's output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.after = nn.Linear(WIDTH, WIDTH).double(), how, 0

    def _layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        if (penstock.current_microbatch() or 0) < self.after:
            return self._layer(x)
        if self.how == "jvp":
            return sum(torch.func.jvp(self._layer, (x,), (torch.ones_like(x),)))  # type: ignore[return-value]
        with forward_ad.dual_level():
            output, tangent = forward_ad.unpack_dual(self._layer(forward_ad.make_dual(x, torch.ones_like(x))))
        return output + tangent  # type: ignore[operator]


@pytest.mark.parametrize(
    ("how", "schedule", "recompute"),
    by_turns(
        ["jvp", "dual"],
        ["1f1b", "zb-h1"],
        ["never", "always"],
        fast=[("jvp", "zb-h1", "never"), ("dual", "1f1b", "always")],
    ),
)
def test_each_step_is_that_of_the_plain_loop(how: str, schedule: str, recompute: str) -> None:
    """On threads 8 of 40 were; under a split backward a detached output had no tangent, on processes too."""
    torch.manual_seed(0)
    stages = [Tangents(how) for _ in range(3)]
    plain, x = nn.Sequential(*copy.deepcopy(stages)), torch.randn(8, WIDTH).double()
    for piece in x.chunk(4):
        (F.mse_loss(plain(piece), piece) / 4).backward()
    wanted = [parameter.grad for parameter in plain.parameters()]
    with penstock.Pipeline(stages, microbatches=4, schedule=schedule, recompute=recompute, loss_fn=F.mse_loss) as pipe:
        for _ in range(12):
            pipe.step(x, target=x)
            torch.testing.assert_close([each.grad for each in pipe.parameters()], wanted, rtol=1e-12, atol=1e-12)
            pipe.zero_grad()


def test_a_stage_that_begins_late_with_it_is_refused() -> None:
    stages = [Tangents("dual") for _ in range(2)]
    stages[1].after = 2
    x = torch.randn(8, WIDTH).double()
    pipe = penstock.Pipeline(stages, microbatches=4, loss_fn=F.mse_loss)
    with pipe, pytest.raises(PeerFailure, match="opens a level of forward-mode differentiation, of which a process"):
        pipe.step(x, target=x)
