"""Models and optimizers of every kind, as named tensors and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import UsageError


class Odd(nn.Module):
    """An empty buffer, a scalar, a transposed parameter, a half, extra state, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.count: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.scale * (x @ self.weight)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert state["seen"].item() == self.count


def odd_pipe() -> penstock.Pipeline:
    stages = [Odd(), nn.Linear(2, 2)]
    return penstock.Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss)


def test_odd_models_come_back_as_they_were(tmp_path: Path) -> None:
    pipe = odd_pipe()
    pipe.step(torch.randn(4, 3), target=torch.randn(4, 2))
    penstock.save(tmp_path / "odd", pipe)
    want = {name: value.clone() for name, value in pipe.state_dict().items() if isinstance(value, torch.Tensor)}
    pipe.close()
    other = odd_pipe()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = penstock.load(tmp_path / "odd", other)
    assert loaded.step == 0
    odd = other.deployment.staged.parts[0].module
    assert odd.count == 2
    assert not odd.weight.is_contiguous()  # what is here keeps its place in memory
    for name, value in other.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, want[name])
            assert value.dtype == want[name].dtype
    other.close()


def test_optimizers_of_every_kind_go_on_exactly(tmp_path: Path) -> None:
    """State with plain values, none at all, two optimizers, a learning rate that is a tensor, frozen parameters."""

    def lists(pipe: penstock.Pipeline) -> Any:
        first, *others = pipe.parameters()
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.RMSprop(others, lr=1e-3)]

    def tensors(pipe: penstock.Pipeline) -> Any:
        return torch.optim.Adam(pipe.parameters(), lr=torch.tensor(1e-2), foreach=False)

    def frozen(pipe: penstock.Pipeline) -> Any:
        first, *others = pipe.parameters()
        first.requires_grad_(False)
        return torch.optim.Rprop(others)

    def made(pipe: penstock.Pipeline) -> Any:
        return torch.optim.LBFGS(pipe.parameters())

    x = torch.randn(4, 3)
    for number, make in enumerate((lists, tensors, frozen, lambda pipe: torch.optim.Adagrad(pipe.parameters()))):

        def trained(pipe: penstock.Pipeline, optimizer: Any) -> float:
            loss = pipe.step(x, target=x).loss.item()
            for each in optimizer if isinstance(optimizer, list) else [optimizer]:
                each.step()
                each.zero_grad()
            return loss

        runs = []
        for _ in range(2):
            torch.manual_seed(number)
            pipe = penstock.Pipeline([nn.Linear(3, 3), nn.Linear(3, 3)], microbatches=2, loss_fn=nn.functional.mse_loss)
            runs.append((pipe, make(pipe)))
        for _ in range(2):
            trained(*runs[0])
        penstock.save(tmp_path / str(number), *runs[0])
        penstock.load(tmp_path / str(number), *runs[1])
        assert [trained(*runs[0]) for _ in range(2)] == [trained(*runs[1]) for _ in range(2)]
        for pipe, _ in runs:
            pipe.close()
    strange = made(pipe := odd_pipe())
    strange.state["line search"] = {"tries": 3}
    with pytest.raises(UsageError, match="keeps state under 'line search'"):
        penstock.save(tmp_path / "strange", pipe, strange)
