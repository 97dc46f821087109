"""Hidden channels between units: what one keeps on itself in its forward, and code on another stage read.

A stage runs its own units only. So the code between the units saw, of a counter or a moving average of another stage's
unit, what it had been at the start (on processes) or what it happened to be (on threads): a loss of 16.70 instead of
15.20 in the second microbatch, and no error. Where writer and readers are on one stage it works as in a plain loop;
where they are not, it is refused.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.nets import Chain, W, rows, square, trains
from processes import on_processes
from torch import Tensor, nn

import penstock
from penstock.errors import FallbackWarning, ModelError, PeerFailure


class Keeps(nn.Linear):
    """A unit that counts its calls, in all the ways there are."""

    def __init__(self, way: str = "buffer") -> None:
        super().__init__(W, W)
        self.way, self.number, self.tensor, self.numbers = way, 0, torch.zeros(()), [0]
        self.register_buffer("buffer", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.inner = nn.Identity()
        self.inner.register_buffer("buffer", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "buffer":
            self.buffer += 1
        elif self.way == "replaced":
            self.replaced = self.replaced + 1
        elif self.way == "inner":
            self.inner.buffer += 1
        elif self.way == "tensor":
            self.tensor += 1
        elif self.way == "numbers":
            self.numbers[0] += 1
        elif self.way == "number" or (self.way == "when training" and self.training):
            self.number += 1
        return super().forward(x)

    def count(self) -> Any:
        kept = {"inner": self.inner.buffer, "when training": self.number, "numbers": self.numbers[0]}
        return kept[self.way] if self.way in kept else getattr(self, self.way)


WAYS = ("buffer", "replaced", "inner", "tensor", "number", "numbers")


class Reads(Chain):
    """Its forward multiplies by what its blocks have counted."""

    def __init__(self, way: str, where: str) -> None:
        super().__init__()
        self.blocks, self.where = nn.ModuleList(Keeps(way) for _ in range(4)), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "first":
            x = x * (1 + sum(block.count() for block in self.blocks))
        for block in self.blocks:
            x = torch.tanh(block(x * (1 + block.count()) if self.where == "each" else x))
        if self.where == "last":
            x = x * (1 + sum(block.count() for block in self.blocks))
        return x * (1 + self.blocks[3].count()) if self.where == "own" else x


@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("way", WAYS)
def test_what_units_of_two_stages_keep_is_not_read_elsewhere(way: str, where: str) -> None:
    told = r"would part blocks\.\d\.[^ ]+ .*from code that reads or changes it.* or let the units .* return it"
    if way == "replaced" and where == "last":
        told = "blocks.0 gives a tensor away other than by returning it"
    with pytest.raises(ModelError, match=told):
        trains(Reads(way, where), rows())


def test_a_cut_that_was_asked_for_and_parts_a_unit_from_its_reader_is_refused() -> None:
    told = r"blocks\.0, on stage 0, changes blocks\.0\.buffer in its forward, and stage 1 reads it, where it would have"
    with pytest.raises(ModelError, match=told):
        trains(Reads("buffer", "last"), rows(), stages=None, split_at=["blocks.2"])


@pytest.mark.parametrize(
    ("way", "where"),
    [*(("buffer", where) for where in ("own", "each")), ("number", "own"), ("numbers", "own"), ("inner", "each")],
)
def test_what_a_unit_keeps_is_read_on_its_own_stage(way: str, where: str) -> None:
    assert trains(Reads(way, where), rows()) == 0.0


def seen_in_training(x: Tensor) -> str:
    """The error of a model, cut in eval mode, whose units keep something in training mode only."""
    model = Reads("when training", "last").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # said on the first rank
        pipe = penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=square, example=(x[:2],))
    with pipe:
        pipe.evaluate(x)
        pipe.train()
        with pytest.raises((ModelError, PeerFailure)) as caught:
            pipe.step(x)
    return str(caught.value)


@pytest.mark.slow
def test_what_a_unit_keeps_only_in_training_is_seen_then() -> None:
    """Nothing changed when the example ran, because the model was in eval mode."""
    assert "forward changes self.blocks.0.number and reads it in the next call" in seen_in_training(rows())


def test_a_cache_that_a_unit_fills_once_and_others_read_is_no_state() -> None:
    class Caches(nn.Linear):
        table: dict[int, float] | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = {size: 1.0 / size for size in range(1, 9)}
            return super().forward(x) * self.table[x.shape[1]]

    class Uses(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x) * (2 if self.blocks[3].table else 1))

    model = Uses()
    model.blocks = nn.ModuleList(Caches(W, W) for _ in range(4))
    model(rows())
    assert trains(model, rows()) == 0.0


class Hidden(nn.Linear):
    """A unit with a way around the model's tree."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__(W, W)
        self.act, self.friends, self.calls = act, list[Any](), 0
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        factor = self.act(self)
        return super().forward(x) * (1 + (factor or 0))


class Befriended(Chain):
    calls = 0

    def __init__(self, act: Callable[[Any], Any], friends: Callable[[Any], Any]) -> None:
        super().__init__()
        self.notes, self.blocks = {"calls": 0}, nn.ModuleList(Hidden(act) for _ in range(4))
        self.generator, self.random = torch.Generator(), random.Random(1)
        for block in self.blocks:
            block.friends = friends(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.calls + self.notes["calls"])


def count_at_root(block: Any) -> None:
    block.friends[0].calls += 1


def count_in_notes(block: Any) -> None:
    block.friends["calls"] += 1


def count_and_ask_others(block: Any) -> int:
    block.calls += 1
    return sum(each.calls for each in block.friends)


def draw(block: Any) -> float:
    return float(torch.rand((), generator=block.friends))


def draw_from_python(block: Any) -> float:
    return float(block.friends.random())


@pytest.mark.parametrize(
    ("act", "friends", "what"),
    [
        (count_at_root, lambda model: [model], "calls"),
        (count_in_notes, lambda model: model.notes, "friends"),
        (count_and_ask_others, lambda model: list(model.blocks), r"blocks\.\d\.calls"),
        (draw, lambda model: model.generator, "friends"),
        (draw_from_python, lambda model: model.random, "friends"),
    ],
)
def test_units_that_share_what_they_change_are_refused(act: Any, friends: Any, what: str) -> None:
    """Through a list that hides a module, one dict, one generator for all: nothing in the tree told of it."""
    with pytest.raises(ModelError, match=rf"changes (blocks\.\d\.)?{what} in its forward, and \S+ reads it"):
        trains(Befriended(act, friends), rows())


def test_what_is_set_inside_of_a_unit_by_the_code_between_is_refused() -> None:
    """On threads all stages have the one inner module, and one stage's mask was another's."""

    class Masked(Hidden):
        def __init__(self) -> None:
            super().__init__(lambda block: 0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.inner.mask

    class Sets(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.inner.mask = (x > 0).to(x)  # type: ignore[union-attr]
            y: Tensor = super().forward(x)
            return y

    with pytest.raises(ModelError, match=r"changes blocks\.0\.inner\.mask, inside of blocks\.0"):
        trains(Sets(block=Masked), rows())


def test_a_module_without_parameters_that_counts_at_the_end_is_not_read_at_the_beginning() -> None:
    class Counter(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * 1.0

    class ChannelEnds(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

        def forward(self, x: Tensor) -> Any:
            return self.counter(super().forward(x * (1 + self.counter.count)))

    with pytest.raises(ModelError, match=r"would part counter\.count from code that reads or changes it"):
        trains(ChannelEnds(), rows())


class Scaled(Chain):
    """A buffer of the model's own and one of the first block, which the code after the last block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.blocks[0].register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale * self.blocks[0].gain


def loaded() -> float:
    """How far the loss is from the plain model's after both have loaded other values than they were made with."""
    torch.manual_seed(0)
    model, x = Scaled(), rows()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["scale"], state["blocks.0.gain"] = torch.tensor(3.0), torch.tensor(2.0)
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=square, example=(x[:2],)) as pipe:
        pipe.load_state_dict(state)
        assert len(dict(pipe.named_buffers())) == len(list(pipe.named_buffers()))
        found = pipe.step(x).loss.item()
    plain = Scaled()
    plain.load_state_dict(state)
    return abs(found - sum(square(plain(part)).item() / 2 for part in x.chunk(2)))


def counted() -> float:
    """How far the loss of a model that may be cut is from the plain one's."""
    torch.manual_seed(0)
    model, x = Reads("buffer", "own"), rows()
    plain = sum((square(model(part)) / 2).item() for part in x.chunk(2))
    for block in model.blocks:
        block.buffer.zero_()  # type: ignore[operator, union-attr]
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=square, example=(x[:2],)) as pipe:
        return abs(pipe.step(x).loss.item() - plain)


def on_a_process() -> tuple[float, float, str]:
    return loaded(), counted(), seen_in_training(rows())


@pytest.mark.slow
def test_buffers_that_other_stages_read_are_loaded_there_and_what_units_keep_is_seen_on_processes_too() -> None:
    """`load_state_dict` gave each process its own units' buffers: the last stage went on with the old scale."""
    for far, counting, error in [on_a_process(), *on_processes(2, on_a_process)]:
        assert far < 1e-6
        assert counting < 1e-6
        assert "forward changes self.blocks.0.number and reads it in the next call" in error
