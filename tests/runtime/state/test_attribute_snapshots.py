"""A look at the plain attributes of modules: what changes is seen and put back, what does not is shared."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure, RunError
from penstock.model.replay.recording.undo import undone
from penstock.runtime.state.recomputation import RecomputedState

MICROBATCHES = 4


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=drawn), torch.randn(8, 4, generator=drawn)


class Holds(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


def changed() -> dict[str, tuple[Any, Any]]:
    """By name: a value, and what changes it in place."""
    return {
        "list": ([1], lambda it: it.append(2)),
        "nested": ({"a": [1]}, lambda it: it["a"].append(2)),
        "in_tuple": (([1], 2), lambda it: it[0].clear()),
        "set": ({1}, lambda it: it.add(2)),
        "deque": (deque([1, 2], maxlen=2), lambda it: it.append(3)),
        "dict": ({"a": 1}, lambda it: it.update(a=it["a"] + 1)),
        "ordered": (OrderedDict(a=1, b=2), lambda it: it.move_to_end("a")),
        "default": (defaultdict(int, a=1), lambda it: it["b"]),
        "counter": (Counter(a=1), lambda it: it.update(["a", "b"])),
        "tensor": (torch.zeros(3), lambda it: it.add_(1)),
        "large": (torch.zeros(100_000), lambda it: it.add_(1)),
        "past_versions": (torch.zeros(2), lambda it: it.data.add_(1)),
        "in_list": ([torch.zeros(3)], lambda it: it[0].add_(1)),
        "generator": (torch.Generator().manual_seed(5), lambda it: torch.rand(3, generator=it)),
    }


def shown(value: Any) -> str:
    return repr(value.get_state().tolist() if isinstance(value, torch.Generator) else value)


@pytest.mark.parametrize("name", list(changed()))
def test_what_changes_in_place_is_copied(name: str) -> None:
    value, change = changed()[name]
    holder = Holds(it=value, same=value)
    attributes = RecomputedState(0, holder)
    texts, looks = [], []
    for _ in range(3):
        texts.append(shown(holder.it))
        looks.append(attributes.before())
        change(holder.it)
        attributes.after(looks[-1])
    now = shown(holder.it)
    assert now != texts[0]
    for text, look in zip(texts, looks, strict=True):
        for _ in range(2):  # a graph that is kept runs again more than once
            with attributes.as_it_was(look):
                assert shown(holder.it) == text
                assert type(holder.it) is type(value)
                assert holder.it is holder.same
                change(holder.it)
            assert holder.it is value
            assert shown(value) == now


@pytest.mark.parametrize("name", [name for name in changed() if name != "past_versions"])
def test_a_look_at_the_model_leaves_no_trace_in_its_attributes(name: str) -> None:
    """A cut by measured times, or by the forward, runs an example: lists in lists kept what it had put there."""
    value, change = changed()[name]
    model = Holds(it=value, seen=0)
    before = shown(value)
    with undone(model):
        change(model.it)
        model.seen = model.made = 1
        assert shown(value) != before
    assert model.it is value
    assert shown(value) == before
    assert model.seen == 0
    assert not hasattr(model, "made")


def test_where_nothing_changes_all_microbatches_share_what_was_seen() -> None:
    holder = Holds(**{name: value for name, (value, _) in changed().items() if name != "past_versions"})
    holder.register_buffer("mask", torch.ones(3))
    attributes = RecomputedState(0, holder)
    looks = []
    for _ in range(3):
        looks.append(attributes.before())
        attributes.after(looks[-1])
    one, other = looks[1], looks[2]
    assert all(one.attributes[number] is other.attributes[number] for number in one.attributes)
    assert all(one.buffers[key] is other.buffers[key] for key in one.buffers)
    assert len(one.buffers) == 1
    (captured,) = [module.captured for module in looks[0].attributes.values() if "large" in module.captured]
    assert captured["large"].copy is None  # it was, for the first forward, which left it alone
    now = dict(vars(holder))
    with attributes.as_it_was(looks[0]):
        assert all(vars(holder)[name] is value for name, value in now.items())


def test_what_no_forward_has_changed_is_left_alone() -> None:
    holder = Holds(set_by_hand=1, counted=1)
    attributes = RecomputedState(0, holder)
    look = attributes.before()
    holder.counted += 1
    del holder.set_by_hand
    holder.set_by_hand = 1
    attributes.after(look)
    holder.set_by_hand = 2
    with attributes.as_it_was(look):
        assert (holder.set_by_hand, holder.counted) == (2, 1)
    assert (holder.set_by_hand, holder.counted) == (2, 2)


class Late(nn.Linear):
    """Writes to a large tensor from its third forward on."""

    def __init__(self, size: int) -> None:
        super().__init__(4, 4)
        self.calls, self.table = 0, torch.zeros(size)

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.table.add_(1)
        return super().forward(input) + self.table[0]


def test_a_large_tensor_that_changes_late_is_refused() -> None:
    x, y = batch()
    for size in (10, 100_000):
        pipe = penstock.Pipeline(
            [Late(size), nn.Linear(4, 4)],
            microbatches=MICROBATCHES,
            schedule="gpipe",
            loss_fn=F.mse_loss,
            recompute="always",
        )
        with pipe:
            if size == 10:
                pipe.step(x, target=y)
                continue
            with pytest.raises(PeerFailure) as failure:
                pipe.step(x, target=y)
            assert isinstance(failure.value.__cause__, RunError)
            assert "a tensor in the attribute table was written to" in str(failure.value.__cause__)
