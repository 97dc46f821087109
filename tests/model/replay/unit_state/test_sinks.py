"""Units that add to lists and dicts beside returning something: what they add crosses cuts as what they return does."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from model.nets import Chain, W, rows, square, trains
from model.zoo import S, compared, make, own_loss
from tiers import by_turns, mostly_slow
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, PeerFailure

_collected: ContextVar[dict[str, list[Any]] | None] = ContextVar("collected", default=None)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Tensor, into: list[Tensor] | None = None, named: dict[str, Any] | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        if into is not None:
            into.append(y * 2)
        if named is not None:
            named[f"number {len(named)}"] = (y.mean(), None, len(named))
        return y


class HandsListOn(Chain):
    def __init__(self) -> None:
        super().__init__(4, Adds)

    def forward(self, x: Tensor) -> Tensor:
        into: list[Tensor] = []
        named: dict[str, Any] = {}
        for block in self.blocks:
            x = torch.tanh(block(x, into, named=named))
        assert [value[2] for value in named.values()] == [0, 1, 2, 3]
        return x + into[0] + into[3] * named["number 1"][0]


class Collects(Chain):
    """Hooks on the blocks and inside of them, and a list that a context variable holds; the glue changes one entry."""

    def __init__(self) -> None:
        super().__init__(4, Adds)
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.collect("outputs", output))
            block.linear.register_forward_hook(lambda module, args, output: self.collect("inner", output.mean()))

    def collect(self, name: str, value: Tensor) -> None:
        collected = _collected.get()
        if collected is not None:
            collected[name].append(value)

    def forward(self, x: Tensor, collect: bool = True) -> Tensor:
        collected: dict[str, list[Any]] = {"outputs": [], "inner": []}
        token = _collected.set(collected if collect else None)
        try:
            x = super().forward(x)
        finally:
            _collected.reset(token)
        if collect:
            assert len(collected["outputs"]) == len(collected["inner"]) == 4
            collected["outputs"][1].mul_(2.0)
            x = x + collected["outputs"][0] + collected["outputs"][1] + sum(collected["inner"])
        return x


@pytest.mark.parametrize(
    ("net", "stages", "schedule"),
    by_turns(
        [HandsListOn, Collects], [2, 4], ["1f1b", "zb-h1"], fast=[(HandsListOn, 4, "zb-h1"), (Collects, 2, "1f1b")]
    ),
)
def test_what_units_add_to_lists_is_exact(net: type[Chain], stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    assert trains(net(), rows(), stages=stages, schedule=schedule) < 1e-6


class Notes:
    """Fields that blocks hand on."""

    def __init__(self, x: Tensor) -> None:
        self.count, self.sum, self.inner = 0, x.new_zeros(()), {"last": 0}


CHANGES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "an entry that was there": (lambda x: {"n": 0}, lambda d, x: d.update(n=d["n"] + 1), lambda d: d["n"]),
    "a tensor in its place": (lambda x: {"t": x.mean()}, lambda d, x: d.update(t=d["t"] + x.mean()), lambda d: d["t"]),
    "a place in a list": (lambda x: [0, 1], lambda a, x: a.__setitem__(0, a[0] + 1), lambda a: a[0]),
    "what is taken away": (lambda x: [1, 2, 3, 4, 5], lambda a, x: a.pop(), len),
    "a key that goes": (lambda x: dict.fromkeys(range(6), 0), lambda d, x: d.popitem(), len),
    "a set": (lambda x: set(), lambda s, x: s.add(len(s)), len),
    "a user's dict": (lambda x: UserDict(), lambda d, x: d.update({len(d): x}), lambda d: d[0].mean() + d[3].mean()),
    "a number in a field": (Notes, lambda o, x: setattr(o, "count", o.count + 1), lambda o: o.count),
    "a tensor in a field": (Notes, lambda o, x: setattr(o, "sum", o.sum + x.mean()), lambda o: o.sum),
    "a new field": (Notes, lambda o, x: setattr(o, f"at{len(vars(o))}", x.shape[0]), lambda o: len(vars(o))),
    "a device": (Notes, lambda o, x: setattr(o, "device", x.device), lambda o: o.device.type == "cpu"),
    "inside of a field": (Notes, lambda o, x: o.inner.update(last=o.inner["last"] + 1), lambda o: o.inner["last"]),
}


@pytest.mark.parametrize("change", mostly_slow(CHANGES, *list(CHANGES)[::3]))
def test_what_units_change_in_what_they_are_handed_is_exact(change: str) -> None:
    """Numbers, because of tensors it was refused: where the unit did not run, they stayed as they were, in silence."""
    make_it, change_it, read_it = CHANGES[change]

    class Changes(nn.Linear):
        def forward(self, x: Tensor, handed: Any) -> Tensor:  # type: ignore[override]
            change_it(handed, x)
            return super().forward(x)

    class Hands(Chain):
        def forward(self, x: Tensor) -> Tensor:
            handed = make_it(x)
            for block in self.blocks:
                x = torch.tanh(block(x, handed))
            return x * (1 + read_it(handed))

    for example in (rows(2, W), rows(3, W)):  # for the second, a run on meta tensors tells what a call changes
        model = Hands()
        model.blocks = nn.ModuleList(Changes(W, W) for _ in range(4))
        assert trains(model, rows(), example=(example,)) == 0.0


def test_another_batch_size_than_the_examples_adds_other_shapes() -> None:
    torch.manual_seed(0)
    assert trains(HandsListOn(), rows(), example=(rows(3, W),)) < 1e-6
    assert trains(Collects(), rows(), recompute="always", example=(rows(3, W),)) < 1e-6


def test_collecting_what_was_not_collected_with_the_example_raises() -> None:
    x = rows()
    options: dict[str, Any] = {
        "stages": 2,
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
    }
    with penstock.Pipeline(Collects(), example={"x": x[:2], "collect": False}, **options) as pipe:
        pipe.step(x=x, collect=False)
        with pytest.raises((ModelError, PeerFailure), match="adds to a list that it left alone with the example"):
            pipe.step(x=x, collect=True)


def all_of_it(output: Any, _: Any = None) -> Tensor:
    """The model's loss, and a little of everything that it has collected."""
    more = [each for each in (output.hidden_states or ()) if each is not None]
    return own_loss(output) + 0.1 * sum((each.square().mean() for each in more), torch.zeros(()))


@pytest.mark.parametrize(
    ("family", "stages", "schedule"),
    by_turns(["Mixtral", "Llama"], [(2, "1f1b"), (4, "zb-v")], fast=[("Llama", 4, "zb-v")]),
)
def test_router_losses_and_hidden_states_of_real_models(family: str, stages: int, schedule: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = make(family)
        more = {"output_router_logits": True} if family == "Mixtral" else {"output_hidden_states": True}
        batches = [batch(S) | more, batch(S + 3) | more]
        loss = own_loss if family == "Mixtral" else all_of_it
        assert compared(model, batches, loss=loss, stages=stages, schedule=schedule) < 2e-6
