"""Hooks that want complete gradients, such as an optimizer in the backward: once a step, or not at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from bugs.small import WIDTH, batch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

MICROBATCHES = 4


def optimizers_in_the_backward(parameters: Any) -> Counter[int]:
    """Update each parameter in its hook, and free its gradient; returns how often the hook of each has run."""
    runs: Counter[int] = Counter()
    for number, parameter in enumerate(parameters):
        optimizer = torch.optim.Adam([parameter], lr=0.05)

        def update(parameter: Tensor, number: int = number, optimizer: torch.optim.Optimizer = optimizer) -> None:
            runs[number] += 1
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    return runs


def tied_linears() -> list[nn.Linear]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    layers[3].weight = layers[0].weight
    return layers


def updated_by_whole_batches(steps: int = 3) -> dict[str, Tensor]:
    """The plain loop of which the hooks are made: each backward is that of a whole batch."""
    model = nn.Sequential(*tied_linears())
    runs, (x, y) = optimizers_in_the_backward(model.parameters()), batch()
    for _ in range(steps):
        F.mse_loss(model(x), y).backward()
    assert set(runs.values()) == {steps}
    return {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}


def updated_in_the_backward(family: str, recompute: str, steps: int = 3) -> dict[str, Tensor]:
    with penstock.Pipeline(
        tied_linears(), microbatches=MICROBATCHES, schedule=family, ranks=2, recompute=recompute, loss_fn=F.mse_loss
    ) as pipe:
        runs, (x, y) = optimizers_in_the_backward(pipe.parameters()), batch()
        for _ in range(steps):
            pipe.step(x, target=y)
        assert dict(runs) == dict.fromkeys(range(len(list(pipe.parameters()))), steps)
        assert all(each.grad is None for each in pipe.parameters())
        return {name: each.detach() for name, each in pipe.named_parameters()}


WITH_FOUR_STAGES = ["interleaved-1f1b", "interleaved-zb", "zb-v"]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("family", WITH_FOUR_STAGES)
def test_an_optimizer_in_the_backward_runs_once_a_step(family: str, recompute: str) -> None:
    """It ran once for each microbatch, on a part of the gradient: weights were off by 1e-4, or the step failed."""
    wanted = updated_by_whole_batches()
    found = updated_in_the_backward(family, recompute)
    torch.testing.assert_close(found, {name: wanted[name] for name in found}, rtol=1e-12, atol=1e-12)


def in_the_backward_on_ranks() -> dict[str, dict[str, Tensor]]:
    return {family: updated_in_the_backward(family, "except_last") for family in WITH_FOUR_STAGES}


def test_an_optimizer_in_the_backward_runs_once_a_step_on_processes() -> None:
    """The weight that two ranks share is complete when both have added to it."""
    wanted = updated_by_whole_batches()
    for rank in on_processes(2, in_the_backward_on_ranks):
        for found in rank.values():
            torch.testing.assert_close(found, {name: wanted[name] for name in found}, rtol=1e-12, atol=1e-12)


class Fails(nn.Linear):
    """Fails in the forward of the microbatch with the number `at`."""

    at: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        if penstock.current_microbatch() == self.at and self.training and self.at is not None:
            raise ArithmeticError("not this one")
        return super().forward(input)


def test_a_step_that_fails_runs_no_hook_and_is_undone() -> None:
    """Updates of the first microbatches stayed, and the note called the step undone."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double(), Fails(WIDTH, WIDTH).double()]
    with penstock.Pipeline(layers, microbatches=MICROBATCHES, loss_fn=F.mse_loss) as pipe:
        runs, (x, y) = optimizers_in_the_backward(pipe.parameters()), batch()
        before = [each.detach().clone() for each in pipe.parameters()]
        layers[1].at = 3
        with pytest.raises(penstock.errors.PeerFailure, match="not this one") as caught:
            pipe.step(x, target=y)
        assert "this step is undone" in " ".join(caught.value.__notes__)
        assert not runs
        assert all(torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True))
        layers[1].at = None
        pipe.step(x, target=y)
        assert dict(runs) == dict.fromkeys(range(4), 1)
        assert not any(torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True))


def test_hooks_of_parameters_without_a_new_gradient_do_not_run_and_removed_ones_neither() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    layers[0].unused = nn.Parameter(torch.ones(()))
    ran: list[str] = []
    with penstock.Pipeline(layers, microbatches=MICROBATCHES, loss_fn=F.mse_loss) as pipe:
        for name, parameter in pipe.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
        handle = layers[1].bias.register_post_accumulate_grad_hook(lambda _: ran.append("twice"))
        layers[0].unused.grad = torch.ones(())
        x, y = batch()
        pipe.step(x, target=y)
        assert sorted(ran) == ["0.bias", "0.weight", "1.bias", "1.weight", "twice"]
        handle.remove()
        ran.clear()
        pipe.evaluate(x, target=y)
        assert ran == []
        pipe.step(x, target=y)  # adds to what the first has left
        assert sorted(ran) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def overlapping_steps() -> list[str]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    with penstock.Pipeline(layers, microbatches=MICROBATCHES, loss_fn=F.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        runs = optimizers_in_the_backward(pipe.parameters())
        done = list(pipe.train_steps([batch()] * 3, optimizer))
        assert set(runs.values()) == {3}
        return [each.together for each in done]


def test_steps_with_such_hooks_do_not_overlap() -> None:
    """What they do could not be taken back."""
    (first, *others), _ = on_processes(2, overlapping_steps)
    assert "first step" in first
    assert others == ["hooks of parameters that want complete gradients"] * 2
