"""An update that is taken back leaves no trace: the right one, made after it, has the bits of one made first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.optim.snapshot import UpdateSnapshot

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov, which writes to gradients": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "lbfgs, whose state has lists": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1),
    "noisy, which draws": lambda parameters: Noisy(parameters, {"lr": 0.1}),
}


class Noisy(torch.optim.Optimizer):
    """Adds random numbers, and counts in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] * (parameter.grad + torch.randn_like(parameter) * group["count"])


class Run:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.data = torch.Generator().manual_seed(1)

    def backward(self) -> None:
        self.model(torch.randn(3, 4, generator=self.data)).pow(2).sum().backward()

    def update(self, scale: float = 1.0) -> None:
        for parameter in self.model.parameters():
            parameter.grad *= scale
        self.optimizer.step(lambda: torch.tensor(0.0))
        self.rate.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        leaves = torch.utils._pytree.tree_leaves([*self.model.parameters(), *self.optimizer.state.values()])
        return [*leaves, self.optimizer.param_groups[0]["lr"], self.rate.last_epoch]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_the_right_update_after_a_wrong_one_is_the_right_update(name, before):
    """Also of a first step, after which there is a state that was not there before."""
    once, twice = Run(name), Run(name)
    for run in (once, twice):
        torch.manual_seed(7)
        snapshot = UpdateSnapshot(run.optimizer, run.rate)
        for number in range(before + 2):
            run.backward()
            if run is twice and number >= before:
                snapshot.take()
                run.update()  # as if nothing were to be scaled
                with snapshot.again():
                    run.update(0.25)
            else:
                run.update(0.25)
    for one, other in zip(once.values(), twice.values(), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_snapshot_allocates_nothing_after_the_first():
    run = Run("adamw")
    snapshot = UpdateSnapshot(run.optimizer)
    kept = []
    for _ in range(3):
        run.backward()
        run.optimizer.step()
        snapshot.take()
        kept.append({id(tensor): held.data_ptr() for tensor, held in snapshot._copies.values()})
        run.optimizer.zero_grad(set_to_none=False)
    assert kept[1] == kept[2]
