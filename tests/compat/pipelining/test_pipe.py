"""A `Pipe` whose stages share what they call: one weight on all of them, where torch makes copies that drift apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.pipelining import ScheduleInterleaved1F1B, pipe_split, pipeline
from penstock.errors import FallbackWarning


class Aliased(nn.Module):
    """Two names for each of two things, one on each side of the split."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.left = nn.Parameter(torch.randn(4, 4))
        self.after = self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(torch.mm(x, self.left)))
        pipe_split()
        out: Tensor = self.after(torch.mm(x, self.right))
        return out


class Looped(nn.Module):
    """One block again and again, and a head at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.block(x))
            pipe_split()
        out: Tensor = self.head(x)
        return out


def check(model: nn.Module, owned: list[set[str]]) -> None:
    plain, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    pipe = pipeline(model, (x[:2],))
    assert [set(pipe.get_stage_module(index).state_dict()) for index in range(pipe.num_stages)] == owned
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    schedule: Any = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        schedule.step(x, target=y)
        nn.functional.mse_loss(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    schedule.close()


def test_a_stage_that_has_only_what_was_used_before_is_a_stage() -> None:
    torch.manual_seed(0)
    held = [{"left", "right", "before.weight", "before.bias"}, {"left", "after.weight", "after.bias"}]
    with pytest.warns(FallbackWarning, match="torch.export graph"):  # the places are parameters, of no unit
        check(Aliased(), held)


def test_each_round_of_a_loop_is_a_stage() -> None:
    torch.manual_seed(0)
    block = {"block.weight", "block.bias"}
    check(Looped(), [block, block, block, {"head.weight", "head.bias"}])
