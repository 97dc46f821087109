"""A model that is changed after its pipeline was built: followed as a plain loop would, or refused, in all ways to cut.

Each case trains a step, changes the model, trains again, and takes the change back, beside a plain loop that does the
same to its own copy. `net.train()` did not reach replayed units and graphs, an exchanged head went on being trained in
its old form, and a buffer that was replaced was the old one for graphs.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from processes import on_processes
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import penstock
from penstock.errors import ModelError, PeerFailure

W = 6
ROWS, MICROBATCHES = 8, 2
Model = Any  # a module, or a list of stage modules
Make = Callable[[Model], Any]


class Block(nn.Module):
    """Everything that can be set on a layer: attributes, a dict, a tensor, buffers, layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.0)
        self.scale, self.options, self.plain = 1.0, {"power": [1.0]}, torch.ones(W)
        self.register_buffer("shift", torch.full((W,), 0.1))
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.norm(self.inner(x))) * self.scale * self.options["power"][0] * self.plain + self.shift
        out = out if self.mask is None else out * self.mask
        return torch.tanh(out) if self.training else out


class Net(nn.Module):
    """The same layers called by a forward that reads the root's flag, attributes and buffers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.0)
        self.block, self.head = Block(), nn.Linear(W, 3)
        self.gain, self.gains = 1.0, [1.0]
        self.register_buffer("offset", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        if self.training:
            x = x * 0.5
        x = x + self.block(x) * self.gain * self.gains[0] + self.offset
        out: Tensor = self.head(x)
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sequential() -> nn.Sequential:
    made = net()
    return nn.Sequential(
        OrderedDict((name, getattr(made, name)) for name in ("first", "norm", "drop", "block", "head"))
    )


def listed() -> list[nn.Module]:
    layers = sequential()
    return [layers[:3], layers[3:]]


def roots(model: Model) -> list[nn.Module]:
    return model if isinstance(model, list) else [model]


def layer(model: Model, name: str) -> Any:
    """A layer by name, in whichever of the stage modules it is."""
    found = [dict(root.named_modules()).get(name) for root in roots(model)]
    return next(each for each in found if each is not None)


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, W, generator=made), torch.randn(ROWS, 3, generator=made)


WAYS: dict[str, tuple[Callable[[], Model], dict[str, Any]]] = {
    "sequential": (sequential, {"stages": 2}),
    "list": (listed, {}),
    "replay": (net, {"stages": 2, "cut_options": penstock.CutOptions(method="replay"), "example": (batch()[0][:4],)}),
    "graph": (net, {"stages": 2, "cut_options": penstock.CutOptions(method="graph"), "example": (batch()[0][:4],)}),
}


def built(way: str, model: Model, **options: Any) -> penstock.Pipeline:
    given = {"microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "timeout": 60, **WAYS[way][1], **options}
    return penstock.Pipeline(model, **given)


@contextmanager
def changed(model: Model, change: Make) -> Iterator[None]:
    """The change, and its end: classes, attributes, boxes in them and tables as they were; values of buffers stay."""
    modules = [module for root in roots(model) for module in root.modules()]
    before = [(module, type(module), dict(vars(module)), copy.deepcopy(boxes(module))) for module in modules]
    tables = [(table, dict(table)) for module in modules for table in vars(module).values() if isinstance(table, dict)]
    trained = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
    listed = list(model) if isinstance(model, list) else []
    change(model)
    try:
        yield
    finally:
        for module, kind, attributes, inside in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update({**attributes, **inside})
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
        if listed:
            model[:] = listed


def boxes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name in ("options", "gains")}


# -- a plain loop


def called(model: Model, x: Tensor) -> Tensor:
    for root in roots(model):
        x = root(x)
    return x


def plain_step(model: Model, dtype: torch.dtype = torch.float32) -> Tensor:
    total = torch.zeros((), dtype=dtype)
    for x, y in zip(*(each.to(dtype).chunk(MICROBATCHES) for each in batch()), strict=True):
        loss = F.mse_loss(called(model, x), y) / MICROBATCHES
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    return total


@torch.no_grad()
def plain_evaluation(model: Model, dtype: torch.dtype = torch.float32) -> Tensor:
    now = copy.deepcopy(model)
    for root in roots(now):
        root.eval()
    return plain_step(now, dtype)


def named(model: Model, what: str) -> dict[str, Any]:
    prefixes = [f"{place}." for place in range(len(model))] if isinstance(model, list) else [""]
    found = zip(prefixes, (getattr(root, what)() for root in roots(model)), strict=True)
    return {prefix + name: value for prefix, pairs in found for name, value in pairs}


def same(
    pipe: penstock.Pipeline, plain: Model, what: str, dtype: torch.dtype = torch.float32, evaluate: bool = True
) -> None:
    """One step, and one evaluation, beside the plain loop's: losses, gradients, buffers."""

    def close(have: Any, want: Any, name: str) -> None:
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6, msg=lambda text: f"{what}, {name}: {text}")

    x, y = (each.to(dtype) for each in batch())
    pipe.zero_grad()
    for root in roots(plain):
        root.zero_grad()
    close(pipe.step(x, target=y).loss, plain_step(plain, dtype), "the loss")
    expected = named(plain, "named_parameters")
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), (what, name)
        close(parameter.grad, expected[name].grad, name) if parameter.grad is not None else None
    if evaluate:
        close(pipe.evaluate(x, target=y).loss, plain_evaluation(plain, dtype), "an evaluation")
    expected = named(plain, "named_buffers")
    for name, buffer in pipe.named_buffers():
        close(buffer, expected[name], name)


# -- what is followed


def put(name: str, attribute: str, value: Callable[[], Any]) -> Make:
    return lambda model: setattr(layer(model, name), attribute, value())


def on_root(change: Callable[[Net], Any]) -> Make:
    return lambda model: change(model) if isinstance(model, Net) else None


def whole(training: bool) -> Make:
    return lambda model: [root.train(training) for root in roots(model)]


def dropping(model: Model) -> None:
    put("drop", "p", lambda: 1.0)(model)
    layer(model, "drop").eval()


def deep(model: Model) -> None:
    layer(model, "block").options["power"][0] = 3.0


FOLLOWED: dict[str, Make] = {
    "a unit to eval": lambda model: layer(model, "norm").eval(),
    "a module without parameters to eval": dropping,
    "a layer with layers to eval": lambda model: layer(model, "block").eval(),
    "a layer inside to eval": lambda model: layer(model, "block.norm").eval(),
    "the model to eval": whole(False),
    "dropout": put("drop", "p", lambda: 1.0),
    "dropout inside": put("block.drop", "p", lambda: 1.0),
    "an attribute": put("block", "scale", lambda: 3.0),
    "an attribute, inside a container": deep,
    "a tensor that is an attribute": put("block", "plain", lambda: torch.full((W,), 1.5)),
    "an attribute of the model": on_root(lambda model: setattr(model, "gain", 2.0)),
    "a list of the model": on_root(lambda model: model.gains.__setitem__(0, 4.0)),
    "a buffer": put("block", "shift", lambda: torch.full((W,), 2.0)),
    "a buffer of another shape": put("block", "shift", lambda: torch.full((1,), 2.0)),
    "a buffer registered again": lambda model: layer(model, "block").register_buffer("shift", torch.full((W,), -3.0)),
    "a buffer of the model": on_root(lambda model: setattr(model, "offset", torch.full((W,), 0.7))),
    "frozen parameters": lambda model: layer(model, "block").requires_grad_(False),
}
FEW = ["a unit to eval", "an attribute, inside a container", "a list of the model", "a buffer of another shape"]


def check_followed(way: str, changes: list[str], **options: Any) -> None:
    model, plain = WAYS[way][0](), WAYS[way][0]()
    with built(way, model, **options) as pipe:
        same(pipe, plain, "at first")
        for what in changes:
            with changed(model, FOLLOWED[what]), changed(plain, FOLLOWED[what]):
                same(pipe, plain, what)
            same(pipe, plain, f"after {what}", evaluate=False)


@pytest.mark.parametrize("way", mostly_slow(["sequential", "list", "replay"], "replay"))
def test_what_can_be_followed_is_followed_as_a_plain_loop_would(way: str) -> None:
    check_followed(way, list(FOLLOWED))
    check_followed(way, FEW, schedule="zb-h1", recompute="always")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [FEW[:2], list(FOLLOWED)], ids=len)
def test_a_graph_follows_by_another_capture(changes: list[str]) -> None:
    check_followed("graph", changes)


@pytest.mark.parametrize("way", mostly_slow(WAYS, "sequential", "replay"))
def test_the_type_of_parameters_is_followed(way: str) -> None:
    model, plain = WAYS[way][0](), WAYS[way][0]()
    with built(way, model) as pipe:
        pipe.step(batch()[0], target=batch()[1])
        plain_step(plain)
        for root in (*roots(model), *roots(plain)):
            root.double()
        same(pipe, plain, "double", torch.float64)


@pytest.mark.parametrize("way", mostly_slow(WAYS, "sequential", "replay"))
def test_a_model_built_in_eval_mode_trains_once_it_is_put_into_training_mode(way: str) -> None:
    """As `from_pretrained` returns it; and `pipe.eval()` is the model's own."""
    model, plain = WAYS[way][0](), WAYS[way][0]()
    for each in (model, plain):
        whole(False)(each)
        layer(each, "drop").p = 1.0
    with built(way, model) as pipe:
        for each in (model, plain):
            whole(True)(each)
            layer(each, "block.norm").eval()
        same(pipe, plain, "training")
        pipe.eval()
        whole(False)(plain)
        assert not any(module.training for root in roots(model) for module in root.modules())
        same(pipe, plain, "eval")
        pipe.train()
        whole(True)(plain)
        same(pipe, plain, "training again")


@pytest.mark.parametrize("way", ["sequential", "list", "replay"])
def test_a_layer_that_is_set_to_draw_draws_and_its_hooks_run(way: str) -> None:
    """On threads, which layers draw was learned in the first step: the second was refused."""
    model = WAYS[way][0]()
    x, y = batch()
    seen = []
    with built(way, model) as pipe:
        still = pipe.step(x, target=y).loss
        layer(model, "drop").p = 0.5
        layer(model, "block").register_forward_hook(lambda module, args, output: seen.append(len(output)))
        assert not torch.equal(pipe.step(x, target=y).loss, still)
        assert seen == [ROWS // MICROBATCHES] * MICROBATCHES


# -- what is refused


def exchanged(model: Model) -> None:
    if isinstance(model, list):
        model[1] = copy.deepcopy(model[1])
    elif isinstance(model, nn.Sequential):
        model[4] = nn.Linear(W, 3)
    else:
        model.head = nn.Linear(W, 3)


def patched(model: Model) -> None:
    block = layer(model, "block")
    block.forward = types.MethodType(lambda self, x: x, block)


def hooked(model: Model) -> None:
    if not isinstance(model, list):  # entries of a list are called as a whole
        model.register_forward_hook(lambda module, args, output: output * 2)
    else:
        exchanged(model)


REFUSED: dict[str, tuple[Make, str]] = {
    "a layer": (exchanged, "exchanged|list of stage modules was changed"),
    "a layer inside": (lambda model: setattr(layer(model, "block"), "inner", nn.Linear(W, W)), "block.inner"),
    "a new layer": (lambda model: layer(model, "block").add_module("more", nn.Linear(W, W)), "block.more was added"),
    "a parameter": (
        lambda model: setattr(layer(model, "head"), "weight", nn.Parameter(torch.zeros(3, W))),
        "head.weight",
    ),
    "a new parameter": (
        lambda model: layer(model, "drop").register_parameter("q", nn.Parameter(torch.ones(1))),
        "drop.q",
    ),
    "a parameter that is gone": (lambda model: setattr(layer(model, "head"), "bias", None), "a parameter of .*head"),
    "a parametrization": (lambda model: parametrizations.weight_norm(layer(model, "head")), "head was a Linear"),
    "a patched forward": (patched, "the forward of .*block was replaced"),
    "a hook on the model": (hooked, "hook was added to the model|list of stage modules"),
}


def check_refused(way: str, pipe: penstock.Pipeline, model: Model, change: str) -> None:
    make, words = REFUSED[change]
    x, y = batch()
    pipe.zero_grad()
    with changed(model, make):
        for call in (pipe.step, pipe.evaluate, pipe.step):
            with pytest.raises(ModelError, match=f"({words}).*new Pipeline"):
                call(x, target=y)
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize("way", mostly_slow(WAYS, "sequential", "replay"))
def test_what_cannot_be_followed_is_refused_with_the_module_and_the_remedy(way: str) -> None:
    model, plain = WAYS[way][0](), WAYS[way][0]()
    with built(way, model) as pipe:
        same(pipe, plain, "at first")
        for change in REFUSED:
            check_refused(way, pipe, model, change)
        same(pipe, plain, "all taken back")


def test_the_forward_of_a_class_and_hooks_of_captured_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    model = net()
    with built("replay", net()) as replayed, built("graph", model) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(Block, "forward", lambda self, x: x)
            for each in (replayed, pipe):
                with pytest.raises(ModelError, match=r"Block.forward was replaced.*new Pipeline"):
                    each.step(x, target=y)
        pipe.step(x, target=y)
        model.block.register_forward_hook(lambda module, args, output: None)
        with pytest.raises(ModelError, match=r"a hook was added to block .*captured in a graph.*new Pipeline"):
            pipe.step(x, target=y)


# -- on processes


def on_each_process() -> None:
    torch.set_num_threads(1)
    for way in ("sequential", "replay"):
        check_followed(way, FEW)
    check_followed("graph", FEW[:1])
    for way in ("sequential", "replay"):
        model = WAYS[way][0]()
        x, y = batch()
        with built(way, model) as pipe:
            pipe.step(x, target=y)
            with changed(model, exchanged), pytest.raises((ModelError, PeerFailure), match="exchanged"):
                pipe.step(x, target=y)
            pipe.step(x, target=y)


@pytest.mark.slow
def test_on_processes() -> None:
    on_processes(2, on_each_process)
