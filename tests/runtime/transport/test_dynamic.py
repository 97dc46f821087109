"""Control flow that depends on the data of each microbatch: module stages may do anything, on both faces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH, MICROBATCHES = 6, 4
State = dict[str, Any]


class Layer(nn.Module):
    """Runs, repeats or leaves out its layer, as the microbatch says; what it returns varies in structure, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State, info: dict[str, Tensor]) -> State:
        if state.get("done"):
            return state
        x = state["x"]
        for _ in range(int(info["depth"].max()) % 3):
            x = torch.tanh(self.layer(x))
        if x.mean() > 0:  # a value decides
            x = self.other(x)
        found = {**state, "x": x, "seen": [*state["seen"], self.number]}
        if int(info["depth"].max()) <= self.number:
            found["done"] = True  # early exit
        if int(info["depth"].min()) % 2:
            found[f"extra {self.number}"] = x * 2
        return found


class First(nn.Module):
    def forward(self, x: Tensor, info: dict[str, Tensor]) -> State:
        return {"x": x[:, :WIDTH], "seen": [], "rest": None}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, state: State) -> Tensor:
        extra = sum(value.mean() for name, value in state.items() if name.startswith("extra"))
        return self.head(state["x"]) + extra + len(state["seen"])


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [First(), Layer(1), Layer(2), Last()]


def batch(step: int) -> tuple[Tensor, State, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(9, WIDTH + step, generator=numbers)  # another width each time
    depth = torch.randint(0, 4, (9,), generator=numbers)
    return x, {"depth": depth}, torch.randn(9, 3, generator=numbers)


def whole(modules: list[nn.Module], x: Tensor, info: State) -> Tensor:
    state = modules[0](x, info)
    for module in modules[1:-1]:
        state = module(state, info)
    return modules[-1](state)  # type: ignore[no-any-return]


def plain(steps: int) -> dict[str, Tensor]:
    modules = stages()
    for step in range(steps):
        x, info, y = batch(step)
        pieces = zip(*(each.tensor_split(MICROBATCHES) for each in (x, info["depth"], y)), strict=True)
        for part, depth, target in pieces:
            (F.mse_loss(whole(modules, part, {"depth": depth}), target) * (len(part) / len(x))).backward()
    names = ((f"{index}.{name}", p) for index, module in enumerate(modules) for name, p in module.named_parameters())
    return {name: p.grad for name, p in names if p.grad is not None}


def pipelined(schedule: str, recompute: str = "never", steps: int = 3) -> dict[str, Tensor]:
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "loss_fn": F.mse_loss}
    with penstock.Pipeline(stages(), microbatches=MICROBATCHES, **options) as pipe:
        for step in range(steps):
            x, info, y = batch(step)
            pipe.step(x, target=y, info=info)
            pipe.evaluate(x[:3], target=y[:3], info={"depth": info["depth"][:3]})
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_may_decide_by_their_data(schedule: str, recompute: str) -> None:
    assert_same(pipelined(schedule, recompute), plain(3))


def on_ranks() -> dict[str, dict[str, Tensor]]:
    return {schedule: pipelined(schedule) for schedule in ("1f1b", "zb-h1")}


@pytest.mark.slow
def test_the_same_on_processes() -> None:
    wanted, answers = plain(3), on_processes(4, on_ranks)
    for schedule in ("1f1b", "zb-h1"):
        assert_same({name: value for found in answers for name, value in found[schedule].items()}, wanted)


class Chained(nn.Module):
    """The same as one step of a Sequential: the side information goes along."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: tuple[Any, State]) -> Any:
        value, info = given
        return (self.layer(value, info), info) if not isinstance(self.layer, Last) else self.layer(value)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_gpipe_too(checkpoint: str) -> None:
    model, other = (nn.Sequential(*map(Chained, stages())) for _ in range(2))
    pipe = penstock.GPipe(model, balance=[1, 1, 1, 1], chunks=MICROBATCHES, checkpoint=checkpoint)
    for step in range(3):
        x, info, y = batch(step)
        F.mse_loss(pipe((x, info)), y).backward()
        pieces = zip(x.tensor_split(MICROBATCHES), info["depth"].tensor_split(MICROBATCHES), strict=True)
        F.mse_loss(torch.cat([other((part, {"depth": depth})) for part, depth in pieces]), y).backward()
    for (name, have), want in zip(pipe.named_parameters(), other.parameters(), strict=True):
        assert (have.grad is None) == (want.grad is None), name
        if have.grad is not None:
            torch.testing.assert_close(have.grad, want.grad)
