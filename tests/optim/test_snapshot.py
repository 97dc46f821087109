"""An update that is taken back leaves no trace: the right one, made after it, has the bits of one made first."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.optim.snapshot import UpdateSnapshot, has_all

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov, which writes to gradients": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "lbfgs, whose state has lists": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1),
    "noisy, which draws": lambda parameters: Noisy(parameters, {"lr": 0.1}),
    "warming up, by attributes": lambda parameters: WarmingUp(parameters, {"lr": 0.1}),
}


class Noisy(torch.optim.Optimizer):
    """Adds random numbers, and counts in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] * (parameter.grad + torch.randn_like(parameter) * group["count"])


class WarmingUp(torch.optim.Optimizer):
    """Counts in an attribute, and keeps a mean of gradients in another that its first step makes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            self.means = getattr(self, "means", [torch.zeros_like(each) for each in group["params"]])
            for parameter, mean in zip(group["params"], self.means, strict=True):
                mean.lerp_(parameter.grad, 0.5)
                parameter -= group["lr"] * mean * min(1.0, self.count / 3)


class Holding(torch.optim.SGD):
    """Has another optimizer inside, as some wrappers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_of_these_a_snapshot_has_all(name):
    run = Run(name)
    run.backward()
    run.update()
    assert has_all(run.optimizer)
    run.optimizer.register_step_post_hook(lambda *_: None)
    assert not has_all(run.optimizer)


def test_of_an_optimizer_that_holds_another_it_has_not():
    assert not has_all(Holding([nn.Parameter(torch.ones(2))]))


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


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
def test_options_that_the_user_sets_after_the_update_stay_set(rate):
    run = Run("adamw")
    (group,) = run.optimizer.param_groups
    group["lr"] = rate
    snapshot = UpdateSnapshot(run.optimizer, run.rate)
    run.backward()
    snapshot.take()
    run.update()
    snapshot.updated()
    if isinstance(rate, Tensor):
        group["lr"].fill_(0.7)
    else:
        group["lr"] = 0.7
    with snapshot.again():
        assert float(group["lr"]) == pytest.approx(0.1)
        run.update(0.25)
        assert float(group["lr"]) == pytest.approx(0.05)  # by the scheduler
    assert float(group["lr"]) == pytest.approx(0.7)
    assert group["betas"] == (0.9, 0.999)
    snapshot.put_back()
    assert float(group["lr"]) == pytest.approx(0.7)


def test_a_parameter_that_is_written_to_after_the_update_is_found():
    run = Run("adamw")
    snapshot = UpdateSnapshot(run.optimizer)
    run.backward()
    snapshot.take()
    run.update()
    snapshot.updated()
    assert snapshot.changed(thoroughly=True) is None
    run.model.bias.data[0] += 1
    assert snapshot.changed() is None
    assert snapshot.changed(thoroughly=True) is run.model.bias
    with torch.no_grad():
        run.model.weight += 1
    assert snapshot.changed() is run.model.weight
    snapshot.updated()
    assert snapshot.changed(thoroughly=True) is None
    run.model.bias.data = run.model.bias.data.clone()
    assert snapshot.changed() is run.model.bias


def _reset_momentum(optimizer: torch.optim.Optimizer) -> None:
    for own in optimizer.state.values():
        own["exp_avg"].zero_()


def _load(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


CHANGES: dict[str, Any] = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "momentum reset": _reset_momentum,
    "loaded": _load,
    "group added": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "parameter taken out": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_or_groups_that_are_changed_after_the_update_are_found(change):
    """They were put back in silence with the update, and an added group ended in an error of zip()."""
    run = Run("adamw")
    snapshot = UpdateSnapshot(run.optimizer)
    for _ in range(2):
        run.backward()
        snapshot.take()
        run.update()
        snapshot.updated()
    run.optimizer.state_dict()
    stranger = nn.Parameter(torch.zeros(1))
    assert run.optimizer.state[stranger] == {}  # looking makes an entry
    assert snapshot.changed(thoroughly=True) is None
    del run.optimizer.state[stranger]
    CHANGES[change](run.optimizer)
    assert snapshot.changed() == "the state of the optimizer, or a parameter group,"


def test_a_row_of_a_16_bit_parameter_that_is_zeroed_by_its_data_is_found():
    """In bfloat16 the norm of 512 rows is the same number with one of them zeroed."""
    table = nn.Parameter(torch.linspace(-1, 1, 512 * 64).reshape(512, 64).bfloat16())
    snapshot = UpdateSnapshot(torch.optim.SGD([table], lr=0.1))
    snapshot.take()
    snapshot.updated()
    assert snapshot.changed(thoroughly=True) is None
    before = table.detach().norm()
    table.data[300] = 0
    assert table.detach().norm() == before
    assert snapshot.changed(thoroughly=True) is table
