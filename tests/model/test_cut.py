"""`CutOptions(method="auto")` takes a graph only where it is proved to be the model's function, and says so.

Replay refuses Python's and numpy's random numbers between units, and torch.export builds one draw in: layer drop by
`random.random() < 0.5` trained the same layers for ever, and `x * random.random()` was a constant.
"""

from __future__ import annotations

import datetime
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model.nets import Chain, W, rows, square, trains
from tiers import mostly_slow
from torch import Tensor, nn

import penstock
from penstock import CutOptions
from penstock.errors import FallbackWarning, ModelError, PeerFailure

GENERATOR, PYTHON, T = np.random.default_rng(1), random.Random(2), torch.Generator()
CALLS = [0]


class Leaks(nn.Module):
    """A block that leaves something on itself which the model reads: replay refuses that, a graph can do it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = out = torch.tanh(self.linear(x))
        return out * 0.5


class Net(nn.Module):
    """`odd` is what each case is about: a factor that the forward takes from somewhere."""

    odd: Callable[[Net], Any]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaks() for _ in range(3))
        self.rng, self.python = np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x + self.blocks[0].kept + self.blocks[2].kept) * self.odd()


def count(_: Any = None) -> float:
    CALLS[0] += 1
    return 1.0 + CALLS[0]


def dropped(net: Net) -> float:
    return 0.5 if net.training and random.random() < 0.5 else 1.0


SOURCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Python's random": (lambda net: random.random(), "Python's random"),
    "one in Python's random": (dropped, "Python's random"),
    "a whole number": (lambda net: random.randint(1, 3), "Python's random"),
    "a generator of Python's, in an attribute": (lambda net: net.python.random(), "Python's random"),
    "a generator of Python's, in a variable": (lambda net: PYTHON.gauss(0.0, 1.0), "Python's random"),
    "numpy's random": (lambda net: float(np.random.rand()), "numpy's random|not the model's function"),
    "a generator of numpy's, in an attribute": (
        lambda net: net.rng.normal(),
        "numpy's random|not the model's function",
    ),
    "a generator of numpy's, in a variable": (
        lambda net: GENERATOR.normal(),
        "numpy's random|not the model's function",
    ),
    "a new generator of numpy's": (lambda net: np.random.default_rng().normal(), "operating system"),
    "a clock": (lambda net: 1.0 + time.perf_counter() % 1e-3, r"a clock \(time.perf_counter\)"),
    "the date": (lambda net: float(datetime.datetime.now().year), r"a clock \(datetime.now\)"),
    "a counter": (count, "not the model's function"),
    "whether it is captured": (lambda net: 2.0 if torch.compiler.is_compiling() else 1.0, "not the model's function"),
    "a seed of its own": (
        lambda net: torch.manual_seed(3) and torch.rand(()),
        "not the model's function|torch's generator",
    ),
}


def cut(model: nn.Module, split: str = "auto", **options: Any) -> penstock.Pipeline:
    given = {"stages": 2, "microbatches": 2, "loss_fn": square, "example": (torch.ones(2, W).cumsum(0),), **options}
    return penstock.Pipeline(model, cut_options=penstock.CutOptions(method=split), **given)


def net(odd: Callable[[Any], Any]) -> Net:
    made: Net = type("Net", (Net,), {"odd": odd})()
    return made


@pytest.mark.parametrize("source", mostly_slow(SOURCES, "Python's random", "numpy's random", "a clock", "a counter"))
def test_a_graph_that_has_a_hidden_input_built_in_is_refused(source: str) -> None:
    odd, words = SOURCES[source]
    model = net(odd)
    before = random.getstate(), repr(np.random.get_state())
    with pytest.raises(ModelError, match=words):
        cut(model)
    assert before == (random.getstate(), repr(np.random.get_state())), "a look leaves no trace"


class Plain(Chain):
    """Replay could cut it, and every stage would take a factor of its own."""

    odd: Callable[[Plain], Any]

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.python = np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.odd()
        for block in self.blocks:
            x = torch.tanh(block(x)) * factor
        return x


def rarely(net: Any) -> float:
    return 2.0 if net.rng.random() < 1e-9 else 1.0


REPLAYED: dict[str, Callable[[Any], Any]] = {
    name: odd for name, (odd, _) in SOURCES.items() if name not in ("the date", "whether it is captured")
} | {
    "a draw that rarely matters": rarely,
    "a generator of torch's, in a variable": lambda _: torch.rand((), generator=T),
}
del REPLAYED["a seed of its own"]  # torch's own numbers are the same on every stage


@pytest.mark.parametrize("source", REPLAYED)
def test_code_that_every_stage_runs_must_not_read_what_changes_from_call_to_call(source: str) -> None:
    """Only the generators of the modules random and numpy.random were looked at: of a generator in an attribute, a
    clock or a counter each stage took a value of its own, where the model computes with one."""
    model: Plain = type("Plain", (Plain,), {"odd": REPLAYED[source]})()
    with pytest.raises(ModelError, match=r"which every stage would (read|draw) anew"):
        cut(model, "replay")


def test_a_unit_may_read_what_changes_from_call_to_call() -> None:
    """It runs in one place; what follows it differs from run to run and says nothing of the code between units."""

    class Jitters(nn.Linear):
        def __init__(self) -> None:
            super().__init__(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * count()

    with cut(Chain(4, Jitters), "replay") as pipe:
        pipe.step(torch.randn(4, W))


def test_what_is_hidden_in_another_mode_is_refused_when_that_comes() -> None:
    """A model from `from_pretrained` is in eval mode, in which no layer is dropped."""
    x = torch.randn(4, W)
    with cut(net(dropped).eval(), "graph") as pipe:
        pipe.evaluate(x)
        pipe.train()
        with pytest.raises((ModelError, PeerFailure), match="Python's random"):
            pipe.step(x)


class Says(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(W, W), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        if torch.compiler.is_compiling():
            x = x.detach()
        return {"near": self.drop(self.linear(x)), "far": x, "rows": len(x)}


def test_a_graph_whose_gradients_go_elsewhere_is_refused() -> None:
    """The outputs are the same; the gradient of all that comes before would have been lost."""
    with pytest.raises(ModelError, match="differs in the parameters that its gradient goes to"):
        cut(nn.Sequential(nn.Linear(W, W), Says()), "graph")


@pytest.mark.slow
def test_a_fallback_trains_as_the_plain_model_and_is_said_once_with_its_reason() -> None:
    torch.manual_seed(0)
    with pytest.warns(FallbackWarning, match=r"torch.export graph.*gives a tensor away.*method='graph'") as told:
        assert trains(net(lambda net: 2.0), torch.randn(4, W), cut_options=CutOptions(method="auto")) <= 1e-6
    assert len(told) == 1
    assert told[0].filename.endswith("nets.py"), "where the Pipeline is made"
    with cut(net(lambda net: 2.0), "graph"):
        pass  # asked for: nothing to say
    gpipe = penstock.GPipe(net(lambda net: 2.0), balance=2, chunks=2)
    with pytest.warns(FallbackWarning):
        gpipe(torch.randn(4, W))


class Draws(Chain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * random.random()


def test_a_model_without_values_is_not_cut_by_a_graph_that_nothing_can_check() -> None:
    with penstock.lazy():
        model = Draws()
    with pytest.raises(ModelError, match=r"Python's random(.|\n)*has no values yet.*method='graph'"):
        cut(model)


def test_a_clock_that_is_read_while_garbage_is_collected_is_not_the_models() -> None:
    """Ours: hypothesis has a callback that times collections, so a model was refused by chance, on a busy machine."""

    class Litters(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2000):
                cycle: list[Any] = []
                cycle.append(cycle)
            return super().forward(x)

    def timed(*_: Any) -> None:
        time.perf_counter()

    gc.callbacks.append(timed)
    try:
        assert trains(Litters(), rows(), cut_options=CutOptions(method="graph")) < 1e-6
    finally:
        gc.callbacks.remove(timed)
