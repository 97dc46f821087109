"""Hooks that a stage registers in its forward fire as often, and on the same gradients, as in a plain loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bugs.small import WIDTH, batch
from processes import on_processes
from tiers import by_turns
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError

RECOMPUTE = ["never", "except_last", "always"]
FAMILIES = ["1f1b", "gpipe", "zb-h1", "interleaved-zb", "zb-v"]
MICROBATCHES = 4


class Fired(Counter[str]):
    """How often each hook fired; it is no state of the stage, which a recomputation would set back."""

    def __deepcopy__(self, memo: Any) -> Fired:
        return Fired()


class Hooked(nn.Module):
    """Hooks on what arrives, on what is between, on both at once, and on its inner module; three change gradients."""

    def __init__(self, fired: Fired) -> None:
        super().__init__()
        self.linear, self.fired = nn.Linear(WIDTH, WIDTH).double(), fired
        self.last = nn.Linear(WIDTH, WIDTH).double()
        self.scale = nn.Parameter(torch.ones(WIDTH).double())  # with it all inputs of `linear` have a gradient
        self.linear.register_full_backward_hook(self._after)
        self.linear.register_full_backward_pre_hook(lambda *_: fired.update(["pre"]))
        self.linear.weight.register_hook(lambda _: fired.update(["weight"]))

    def _after(self, module: nn.Module, into: Any, out: Any) -> Any:
        self.fired.update(["module"])
        return None if into[0] is None else (into[0] * 1.25,)

    def _changing(self, name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.fired.update([name])
            return gradient * factor

        return hook

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._changing("arrived", 0.5))
        y = torch.tanh(self.linear(x * self.scale))
        if y.requires_grad:
            y.register_hook(self._changing("between", 0.75))
            both = [each for each in (x, y) if each.requires_grad]
            register_multi_grad_hook(both, lambda _: self.fired.update(["several"]))
        z = self.last(y)
        if z.requires_grad:
            z.register_hook(self._changing("last", 1.5))
            z.grad_fn.register_prehook(lambda gradients: (2 * gradients[0],))
        return z


def stages(count: int) -> tuple[list[Hooked], list[Fired]]:
    torch.manual_seed(0)
    fired = [Fired() for _ in range(count)]
    return [Hooked(each) for each in fired], fired


def plain(count: int, steps: int = 2) -> tuple[list[dict[str, int]], list[Tensor]]:
    """The plain loop of gradient accumulation: how often hooks fired, and the weights after all steps."""
    layers, fired = stages(count)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        for x, y in zip(*(each.split(2) for each in batch()), strict=True):
            (F.mse_loss(model(x), y) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [dict(each) for each in fired], [each.detach() for each in model.parameters()]


def piped(family: str, recompute: str, steps: int = 2) -> tuple[list[dict[str, int]], dict[str, Tensor]]:
    count = 2 if family in ("1f1b", "gpipe", "zb-h1") else 4
    layers, fired = stages(count)
    with penstock.Pipeline(
        layers, microbatches=MICROBATCHES, schedule=family, ranks=2, recompute=recompute, loss_fn=F.mse_loss
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        x, y = batch()
        for _ in range(steps):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: each.detach() for name, each in pipe.named_parameters()}
        return [dict(each) for each in fired], weights


def check(family: str, found: list[tuple[list[dict[str, int]], dict[str, Tensor]]]) -> None:
    count = 2 if family in ("1f1b", "gpipe", "zb-h1") else 4
    wanted, weights = plain(count)
    fired = [{name: times for each in found for name, times in each[0][stage].items()} for stage in range(count)]
    assert fired == wanted
    assert all(times == 2 * MICROBATCHES for stage in wanted for times in stage.values())
    names = [name for name, _ in nn.ModuleList(stages(count)[0]).named_parameters()]
    have = {name: weight for _, each in found for name, weight in each.items()}
    torch.testing.assert_close([have[name] for name in names], weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "recompute"),
    by_turns(FAMILIES, RECOMPUTE, fast=[(f, RECOMPUTE[row % len(RECOMPUTE)]) for row, f in enumerate(FAMILIES)]),
)
def test_hooks_fire_once_for_each_microbatch(family: str, recompute: str) -> None:
    """A hook on what arrived fired twice where the forward ran again: both forwards ran on one leaf."""
    check(family, [piped(family, recompute)])


def all_of_them() -> dict[tuple[str, str], Any]:
    return {(family, how): piped(family, how) for family in FAMILIES for how in RECOMPUTE}


@pytest.mark.slow
def test_hooks_fire_once_for_each_microbatch_on_processes() -> None:
    ranks = on_processes(2, all_of_them)
    for family in FAMILIES:
        for how in RECOMPUTE:
            check(family, [rank[family, how] for rank in ranks])


def test_a_hook_on_a_parameter_that_each_forward_registers_is_refused() -> None:
    """With several microbatches under way it fires for all of them, and twice as often where a forward runs again."""

    class Registers(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            handle = self.weight.register_hook(lambda gradient: handle.remove() or gradient * 2)
            return super().forward(input)

    x, y = batch()
    pipe = penstock.Pipeline([Registers(WIDTH, WIDTH).double()], microbatches=MICROBATCHES, loss_fn=F.mse_loss)
    with pipe, pytest.raises(penstock.errors.PeerFailure, match="stage 0 registers a hook on its parameter weight in"):
        pipe.step(x, target=y)


class Retaining(nn.Module):
    """Keeps the gradient of what arrives, as `retain_grad()` does for a tensor that is no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.arrived: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.retain_grad()
            self.arrived = [*self.arrived, x]
        return self.linear(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_may_retain_the_gradient_of_what_it_receives(schedule: str) -> None:
    """It was None from the second microbatch on: a stage's input is a leaf, of which torch retains nothing more."""
    x, y = batch()
    first, last = nn.Linear(WIDTH, WIDTH).double(), Retaining()
    with penstock.Pipeline([first, last], microbatches=MICROBATCHES, schedule=schedule, loss_fn=F.mse_loss) as pipe:
        for _ in range(2):
            last.arrived = []
            pipe.step(x, target=y)
            found = [each.grad for each in last.arrived]
    for given, wanted, gradient in zip(x.split(2), y.split(2), found, strict=True):
        hidden = first(given)
        hidden.retain_grad()
        (F.mse_loss(last.linear(hidden), wanted) / MICROBATCHES).backward()
        assert torch.equal(gradient, hidden.grad)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_an_optimizer_in_the_backward_is_refused_under_loss_scaling(registered: str) -> None:
    """It updated weights by gradients that were 1024 times too large, and no rank asked whether they are finite.

    A step that is refused changes nothing, and the hook stays.
    """
    x, y = batch()
    calls: list[Tensor] = []
    layers = [nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()]
    with penstock.Pipeline(layers, microbatches=MICROBATCHES, loss_fn=F.mse_loss) as pipe:
        scaler = penstock.GradScaler(pipe, init_scale=2.0**10) if registered == "after" else None
        hook = layers[1].weight.register_post_accumulate_grad_hook(calls.append)
        if scaler is None:
            pipe.step(x, target=y)
            assert len(calls) == 1
            pipe.zero_grad()
            scaler = penstock.GradScaler(pipe, init_scale=2.0**10)
        for _ in range(2):
            with pytest.raises(UsageError, match="scaled by 1024"):
                pipe.step(x, target=y)
        assert len(calls) == (registered == "before")
        assert all(parameter.grad is None for parameter in pipe.parameters())
        hook.remove()
        pipe.step(x, target=y)
        scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))
