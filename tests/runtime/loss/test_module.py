"""A loss function with parameters of its own, and forwards that train what their stage does not hold."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes
from runtime.loss.learned import Learned, M, W, agrees, batch, made, plain, trained, with_closure
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import ParallelOptions
from penstock.errors import ModelError


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_learned_loss_trains_as_in_a_plain_loop(schedule: str, recompute: str) -> None:
    found = trained(schedule=schedule, recompute=recompute)
    assert found.keys() == plain().keys()
    agrees(found, plain())


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


@pytest.mark.parametrize("transport", [None, "shared"])
def test_a_loss_that_is_set_later_brings_its_parameters(transport: str | None) -> None:
    """They were in no optimizer, and its weights were those of the loss before."""
    if transport is None:
        changed_later()
    else:
        on_processes(2, changed_later, transport)


def changed_later(transport: str | None = None) -> None:
    (model, loss_fn), (x, y) = made(), batch()
    plain_model, plain_loss = made()
    with penstock.Pipeline(
        model, stages=2, microbatches=M, loss_fn=F.mse_loss, timeout=30, transport=transport
    ) as pipe:
        pipe.step(x, target=y)
        pipe.zero_grad()
        pipe.loss_fn = loss_fn
        for _ in range(2):
            pipe.step(x, target=y)
        for _ in range(2):
            for rows, target in zip(x.chunk(M), y.chunk(M), strict=True):
                (plain_loss(plain_model(rows), target) / M).backward()
        wanted = dict(plain_model.named_parameters()) | {"loss_fn.log_var": plain_loss.log_var}
        found = dict(pipe.named_parameters())
        assert ("loss_fn.log_var" in found) == pipe.is_last
        for name, parameter in found.items():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-10, atol=1e-12)
        pipe.loss_fn = F.mse_loss
        assert "loss_fn.log_var" not in dict(pipe.named_parameters())
        pipe.step(x, target=y)
