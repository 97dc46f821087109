"""A loss function with parameters of its own, and forwards that train what their stage does not hold."""

from __future__ import annotations

import functools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import ParallelOptions
from penstock.errors import ModelError, PenstockError

W, M, ROWS, STEPS = 6, 2, 8, 3


class Learned(nn.Module):
    """A learned weight, and the moving mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        error = F.mse_loss(output, target)
        if self.training:
            self.mean.mul_(0.9).add_(error.detach(), alpha=0.1)
        return torch.exp(-self.log_var) * error + self.log_var


def made() -> tuple[nn.Sequential, Learned]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(W, W) for _ in range(4))).double(), Learned().double()


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, W, generator=source, dtype=torch.float64)
    return x, y


def plain(replicas: int = 1) -> dict[str, Tensor]:
    """The loop on one device; buffers follow the rows of the first replica."""
    (model, loss_fn), (x, y) = made(), batch()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        for number, (rows, target) in enumerate(zip(x.chunk(M * replicas), y.chunk(M * replicas), strict=True)):
            loss_fn.train(number < M)
            (loss_fn(model(rows), target) / (M * replicas)).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *loss_fn.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), **{f"loss_fn.{name}": value for name, value in loss_fn.state_dict().items()}}


def trained(**options: Any) -> dict[str, Tensor]:
    """The same through a pipeline: what this process has of it."""
    (model, loss_fn), (x, y) = made(), batch()
    mesh = options.get("mesh")
    if mesh is not None:
        x, y = (each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for each in (x, y))
        if mesh.get_local_rank("dp"):
            nn.init.constant_(loss_fn.log_var, 5.0)  # all replicas start from the first one's
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            pipe.step(x, target=y)
            pipe.evaluate(x, target=y)  # leaves the loss's buffers alone
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        whole = pipe.full_state_dict()
        assert list(whole) == list(model.state_dict(keep_vars=True))
        last = pipe.deployment.ranks.last is not None
        assert ("loss_fn.log_var" in dict(pipe.named_parameters())) == last
        own = {name: value.clone() for name, value in pipe.state_dict().items() if name.startswith("loss_fn.")}
        return {**whole, **own}


def agrees(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_learned_loss_trains_as_in_a_plain_loop(schedule: str, recompute: str) -> None:
    found = trained(schedule=schedule, recompute=recompute)
    assert found.keys() == plain().keys()
    agrees(found, plain())


def attempt(function: Any) -> str:
    try:
        function()
    except PenstockError as error:
        return str(error)
    return ""


def with_penalty(**options: Any) -> str:
    """An L2 term over all of the model's parameters."""
    (model, _), (x, y) = made(), batch()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * sum(each.square().sum() for each in model.parameters())

    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe:
        return attempt(lambda: pipe.step(x, target=y))


def with_closure(kind: type, after: int = 0, **options: Any) -> tuple[str, list[str]]:
    """A plain function that trains what is in its closure, after some calls: the error, and the warnings."""
    (model, _), (x, y) = made(), batch()
    log_var: Any = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_var = nn.Parameter(log_var.detach()) if kind is nn.Parameter else log_var

    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(None)
        loss = F.mse_loss(output, target)
        return loss if len(calls) <= after else torch.exp(-log_var) * loss + log_var

    with (
        penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        said = ""
        for _ in range(1 + after):  # after each call, a step more is enough
            said = said or attempt(lambda: pipe.step(x, target=y))
    return said, [str(each.message) for each in caught if "which no stage holds" in str(each.message)]


def inner_gradient(output: Tensor, target: Tensor) -> Tensor:
    """A leaf that is made in the forward itself is nobody's to train."""
    probe = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(probe, target), probe, create_graph=True)
    return F.mse_loss(output, target) + slope.square().sum()


def on_ranks() -> dict[str, Any]:
    (model, _), (x, y) = made(), batch()
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=inner_gradient, timeout=30) as pipe:
        pipe.step(x, target=y)
        pipe.step(x, target=y)
    return {
        "trained": trained(),
        "penalty": with_penalty(),
        "parameter": with_closure(nn.Parameter),
        "tensor": with_closure(Tensor),
        "later": with_closure(nn.Parameter, 4 * M),
    }


def test_on_processes_it_is_the_last_ranks_and_others_are_told_of_what_no_stage_holds() -> None:
    first, last = on_processes(2, on_ranks)
    agrees(first["trained"], plain())
    agrees(last["trained"], plain())
    assert "loss_fn.mean" in last["trained"]
    assert "loss_fn.mean" not in first["trained"]
    for found in (first, last):
        told = r"stage 1 or its loss_fn computes with [01]\.(weight|bias), a parameter of rank 0 \(stage 0\)"
        assert re.search(told, found["penalty"])
        assert "weight_decay" in found["penalty"]
    for kind in ("parameter", "tensor", "later"):
        assert first[kind] == ("", [])
        said, warned = last[kind]
        assert said == ""
        assert len(warned) == 1
        assert "trains log_var of shape ()" in warned[0]
        assert "pass loss_fn= as an nn.Module" in warned[0]


def on_replicas() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, dp=2)
    return {
        **{kind: trained(mesh=mesh, parallel_options=ParallelOptions(replicate=kind)) for kind in ("ddp", "fsdp")},
        "closure": with_closure(nn.Parameter, mesh=mesh)[0],
        "later": with_closure(nn.Parameter, 4 * M, mesh=mesh)[0],
    }


@pytest.mark.slow
def test_replicas_reduce_it_and_refuse_what_they_cannot() -> None:
    for number, told in enumerate(on_processes(4, on_replicas)):
        for kind in ("ddp", "fsdp"):
            own = {name: value for name, value in told[kind].items() if name != "loss_fn.mean"}
            agrees(own, plain(replicas=2))
            assert ("loss_fn.log_var" in own) == (number >= 2)
        for kind in ("closure", "later"):  # the second was trained apart in every replica, without a word
            assert "trains log_var of shape (), which no stage holds: each replica would train its own" in told[kind]


def test_in_one_process_a_closure_and_a_penalty_work_as_ever() -> None:
    assert with_penalty() == ""
    assert with_closure(nn.Parameter) == ("", [])


def test_a_checkpoint_has_the_loss_and_a_state_of_the_model_alone_leaves_it(tmp_path: Path) -> None:
    x, y = batch()

    def piped(loss_fn: Any) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
        pipe = penstock.Pipeline(made()[0], stages=2, microbatches=M, loss_fn=loss_fn)
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.1)

    pipe, optimizer = piped(made()[1])
    pipe.step(x, target=y)
    optimizer.step()
    penstock.save(tmp_path / "saved", pipe, optimizer)
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    other, its = piped(made()[1])
    penstock.load(tmp_path / "saved", other, its)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    other.load_state_dict(made()[0].state_dict())
    assert torch.equal(other.state_dict()["loss_fn.log_var"], state["loss_fn.log_var"])
    with pytest.raises(ModelError, match=r"missing \['loss_fn.mean'\]"):
        other.load_state_dict({name: value for name, value in state.items() if name != "loss_fn.mean"})
    without, _ = piped(F.mse_loss)
    penstock.load(tmp_path / "saved", without)
    without.load_state_dict(state)
    assert set(without.state_dict()) == set(made()[0].state_dict())


def test_what_is_a_loss_with_a_state() -> None:
    model, loss_fn = made()

    def names(given: Any) -> set[str]:
        with penstock.Pipeline(made()[0], stages=2, microbatches=M, loss_fn=given) as pipe:
            return {name for name in pipe.state_dict() if name.startswith("loss_fn.")}

    both = {"loss_fn.log_var", "loss_fn.mean"}
    assert names(loss_fn) == names(loss_fn.forward) == names(functools.partial(loss_fn)) == both
    assert names(nn.MSELoss()) == names(F.mse_loss) == names(nn.CrossEntropyLoss(weight=torch.ones(W))) == set()
    clash = nn.Sequential()
    clash.add_module("first", model)
    clash.add_module("loss_fn", Learned())
    with pytest.raises(ModelError, match=r"the model has loss_fn.log_var, loss_fn.mean, and loss_fn= has"):
        penstock.Pipeline(clash, stages=2, microbatches=M, loss_fn=loss_fn)


def test_parity_leaves_the_users_loss_alone() -> None:
    (model, loss_fn), (x, y) = made(), batch()
    report = penstock.parity(model, x, target=y, pipeline={"stages": 2, "microbatches": M, "loss_fn": loss_fn})
    assert report.exact
    assert loss_fn.log_var.grad is None
    assert loss_fn.mean == 0
