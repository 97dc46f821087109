"""An update that is taken back leaves no trace: the right one, made after it, has the bits of one made first."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from accelerator.harness import NAMES, on_device
from tiers import mostly_slow
from torch import Tensor, nn

from penstock.runtime.optim.snapshot import UpdateSnapshot, WeightsSeen, has_all

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "nesterov, which writes to gradients": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "lbfgs, whose state has lists": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1),
    "noisy, which draws": lambda parameters: Noisy(parameters, {"lr": 0.1}),
    "noisy, by Python's numbers": lambda parameters: NoisyByPython(parameters, {"lr": 0.1}),
    "warming up, by attributes": lambda parameters: WarmingUp(parameters, {"lr": 0.1}),
    "counting, in a slot and its class": lambda parameters: Counting(parameters, {"lr": 0.1}),
}


class Noisy(torch.optim.Optimizer):
    """Adds random numbers, and counts in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                parameter -= group["lr"] * (parameter.grad + torch.randn_like(parameter) * group["count"])


class NoisyByPython(torch.optim.Optimizer):
    """Adds random numbers of Python's and numpy's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad + random.random() + np.random.rand()


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


class Counting(torch.optim.Optimizer):
    """Counts in an attribute of its class, and in a slot that its first step fills."""

    __slots__ = ("steps",)
    made = 0
    scales: ClassVar[list[Tensor]] = [torch.ones(())]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps = getattr(self, "steps", 0) + 1
        Counting.made += 1
        Counting.scales[0] *= 0.9
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad * self.scales[0] / (self.steps * Counting.made)


class HoldingByClass(torch.optim.SGD):
    """Its class has a place for anything."""

    seen: ClassVar[Counter[str]] = Counter()


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


def test_of_an_optimizer_whose_class_holds_an_object_it_has_not():
    assert not has_all(HoldingByClass([nn.Parameter(torch.ones(2))], lr=0.1))


class Run:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        Counting.made, Counting.scales = 0, [torch.ones(())]
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
    made = []
    for by_a_wrong_one in (False, True):
        run = Run(name)
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        snapshot = UpdateSnapshot(run.optimizer, run.rate)
        for number in range(before + 2):
            run.backward()
            if by_a_wrong_one and number >= before:
                snapshot.take()
                run.update()  # as if nothing were to be scaled
                with snapshot.again():
                    run.update(0.25)
            else:
                run.update(0.25)
        made.append(run.values())
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def updated_again_on_a_device() -> list[list[float]]:
    """What an optimizer that draws on its device makes of a parameter: at once, and after a wrong update."""
    from accelerator import pretend

    made = []
    for by_a_wrong_one in (False, True):
        parameter = nn.Parameter(torch.ones(4, device=pretend.device(0)))
        parameter.grad = torch.ones_like(parameter)
        optimizer = Noisy([parameter], {"lr": 0.1})
        torch.manual_seed(7)
        snapshot = UpdateSnapshot(optimizer)
        if by_a_wrong_one:
            snapshot.take()
            optimizer.step()
            with snapshot.again():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.step()
        made.append(parameter.tolist())
    return made


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_the_right_update_draws_on_a_device_what_the_wrong_one_drew(name: str) -> None:
    """Only the CPU's generator was put back: with clipping, a loop on devices was not the plain loop."""
    at_once, again = on_device(updated_again_on_a_device, name=name).value
    assert again == at_once


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


def test_a_parameter_that_is_written_to_before_its_update_is_found():
    run = Run("adamw")
    seen = WeightsSeen(run.optimizer)
    assert seen.changed() is None
    run.model.bias.data[0] += 1
    assert seen.changed() is run.model.bias
    with torch.no_grad():
        run.model.weight += 1
    assert seen.changed() is run.model.weight
    seen = WeightsSeen(run.optimizer)
    assert seen.changed() is None
    run.model.weight.grad = torch.zeros_like(run.model.weight)
    assert seen.changed() is run.model.weight
    run.model.weight.grad = None
    run.model.bias.data = run.model.bias.data.clone()
    assert seen.changed() is run.model.bias


WRITES: dict[str, Any] = {
    "sign": lambda values: values.neg_(),
    "signs of two columns": lambda values: values[:, 1:3].neg_(),
    "order of rows": lambda values: values.copy_(values.flip(0)),
    "order of columns": lambda values: values.copy_(values.flip(1)),
    "order": lambda values: values.copy_(values.flatten()[torch.randperm(values.numel())].view_as(values)),
    "two entries": lambda values: values[0, :2].copy_(values[0, :2].flip(0)),
    "beside a row of NaN": lambda values: values[1].neg_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_its_data_that_keeps_the_norm_of_a_parameter_is_found(write, dtype):
    """Found by the norm, it was undone in silence with the update."""
    table = nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).to(dtype))
    bias = nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(1)).to(dtype))
    if write == "beside a row of NaN":
        table.data[0, 3] = bias.data[0] = torch.nan
    optimizer = torch.optim.SGD([bias, table], lr=0.1)
    drawn = torch.get_rng_state()
    seen = WeightsSeen(optimizer)
    assert seen.changed() is None
    assert torch.equal(torch.get_rng_state(), drawn)
    WRITES[write](table.data)
    assert seen.changed() is table
    seen = WeightsSeen(optimizer)
    bias.data[1:] = bias.data[1:].flip(0)
    assert seen.changed() is bias


ADAM = [
    {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay, **kernel}
    for amsgrad in (False, True)
    for maximize in (False, True)
    for decay in (0.0, 0.1)
    for kernel in ({"foreach": False}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.1)})
]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_no_kernel_of_adam_writes_to_gradients_so_that_no_copy_of_them_is_needed(kind):
    """Should one of a newer torch do so, its optimizer is taken out of the list in the snapshot."""
    for options in ADAM:
        made = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=made)) for shape in ((3, 4), (5,), ())]
        optimizer = kind(parameters, **options)
        snapshot = UpdateSnapshot(optimizer)
        for _ in range(3):
            gradients = [torch.randn(parameter.shape, generator=made) for parameter in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            snapshot.take()
            optimizer.step()
            assert all(map(torch.equal, gradients, [parameter.grad for parameter in parameters])), options
        assert not {id(parameter.grad) for parameter in parameters} & set(snapshot._copies)


def test_gradients_are_copied_for_an_optimizer_that_may_write_to_them():
    run = Run("nesterov, which writes to gradients")
    snapshot = UpdateSnapshot(run.optimizer)
    run.backward()
    snapshot.take()
    assert {id(parameter.grad) for parameter in run.model.parameters()} <= set(snapshot._copies)


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
def test_state_or_groups_that_are_changed_before_an_update_are_found(change):
    """They were put back in silence with the update, and an added group ended in an error of zip()."""
    run = Run("adamw")
    for _ in range(2):
        run.backward()
        run.update()
    for parameter in run.model.parameters():
        parameter.grad = None
    seen = WeightsSeen(run.optimizer)
    run.optimizer.state_dict()
    stranger = nn.Parameter(torch.zeros(1))
    assert run.optimizer.state[stranger] == {}  # looking makes an entry
    assert seen.changed() is None
    del run.optimizer.state[stranger]
    CHANGES[change](run.optimizer)
    assert seen.changed() == "the state of the optimizer, or a parameter group,"


def test_a_row_of_a_16_bit_parameter_that_is_zeroed_by_its_data_is_found():
    """In bfloat16 the norm of 512 rows is the same number with one of them zeroed."""
    table = nn.Parameter(torch.linspace(-1, 1, 512 * 64).reshape(512, 64).bfloat16())
    seen = WeightsSeen(torch.optim.SGD([table], lr=0.1))
    assert seen.changed() is None
    before = table.detach().norm()
    table.data[300] = 0
    assert table.detach().norm() == before
    assert seen.changed() is table
