"""The buffers of a stage whose forward runs a second time are those of the first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure


class Power(nn.Module):
    """Reads a buffer that it updates, as spectral norm does; `blank`: elements that make the buffer a large one."""

    def __init__(self, blank: int = 0) -> None:
        super().__init__()
        self.linear, self.calls, self.late = nn.Linear(4, 4), 0, 0
        self.register_buffer("state", torch.ones(1 + blank))
        self.state: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.late:
            with torch.no_grad():
                self.state += x.abs().mean()
        out: Tensor = self.linear(x) * self.state[0].clone()
        return out


@pytest.mark.parametrize("blank", [0, 100_000])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_it_runs_on_the_buffers_of_the_first_time(schedule: str, blank: int) -> None:
    """A6: it ran on today's, which later microbatches had written: other gradients, without a word."""
    torch.manual_seed(0)
    stages = [Power(blank) for _ in range(4)]
    found = penstock.parity(
        stages,
        torch.randn(8, 4),
        target=torch.randn(8, 4),
        pipeline={"microbatches": 4, "schedule": schedule, "ranks": 2, "loss_fn": F.mse_loss, "recompute": "always"},
    )
    assert found.exact


def test_a_large_buffer_that_begins_to_change_later_is_an_error() -> None:
    """Large buffers that the first forward leaves alone are not copied, so that their past is lost."""
    stages = [Power(100_000), nn.Linear(4, 4)]
    stages[0].late = 1
    x = torch.randn(8, 4)
    pipe = penstock.Pipeline(stages, microbatches=4, schedule="gpipe", loss_fn=F.mse_loss, recompute="always")
    with pytest.raises(PeerFailure, match=r"stage 0: buffer state of Power has changed .* use recompute='never'"):
        pipe.step(x, target=x)
