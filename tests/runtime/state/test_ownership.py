"""Whose memory it is: what a stage got is whole again where it is needed again."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.state.ownership import versions

Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.zeros(1).add_(1), torch.zeros(2)


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.linear(x), "scale": x.detach() * 2}


class Spoils(nn.Module):
    """Empties the dict that it got, and writes into what was in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, got: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.linear(got.pop("hidden")) * got.pop("scale").mul_(2)
        return out


def test_a_stage_that_spoils_what_it_got_gets_it_whole_again() -> None:
    """A6: the second run found an empty dict, or a tensor that the first had written to."""
    torch.manual_seed(0)
    options = {"microbatches": 4, "loss_fn": F.mse_loss, "recompute": "always"}
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    assert penstock.parity([Makes(), Spoils()], x, target=y, pipeline=options).output == 0.0


def test_buffers_and_attributes_lie_in_memory_as_in_the_first_forward() -> None:
    """Kernels may round by where their inputs start, and by their strides."""
    seen = set()  # not an attribute, which would be another one in the recomputation

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)
            self.register_buffer("moves", torch.zeros(40)[3:38].view(5, 7)[:, 1:6])
            self.register_buffer("stays", torch.ones(40)[1:26].view(5, 5).t())
            self.kept = torch.zeros(9)[2:7]

        def forward(self, x: Tensor) -> Tensor:
            for name in ("moves", "stays", "kept"):
                tensor = getattr(self, name)
                seen.add((name, tensor.stride(), tensor.data_ptr() % 64))
            self.moves += 1
            self.kept += 1
            return self.layer(x) @ self.moves @ self.stays + self.kept

    stages: list[nn.Module] = [Counts(), Counts()]
    pipe = penstock.Pipeline(stages, microbatches=4, loss_fn=F.mse_loss, recompute="always")
    x, y = torch.randn(2, 8, 5).unbind()
    for _ in range(2):
        pipe.step(x, target=y)
    assert seen == {("moves", (7, 1), 16), ("stays", (1, 5), 4), ("kept", (1,), 8)}


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        None,
        3,
        (ONE, None, TWO),
        ((ONE,), {"mask": TWO, "no": None}),
        ({"deep": [(ONE, [TWO, None])]}, 7, "text", ONE),
        (Pair(ONE, 1), nn.Parameter(torch.ones(1)), {"a": (TWO,)}),
    ],
    ids=str,
)
def test_every_tensor_of_a_value_is_watched_wherever_it_lies(value: Any) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    watched = versions(value)
    assert [id(tensor) for tensor, _ in watched] == list(map(id, tensors))
    assert [version for _, version in watched] == [tensor._version for tensor in tensors]


class EmitsItsMemory(nn.Module):
    """Computes into an attribute, which it writes to again for the next microbatch, from its n-th forward on."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.after, self.forwards = after, 0
        self.kept = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        hidden = self.linear(x)
        if self.forwards <= self.after:
            return hidden, x.detach() * 2
        with torch.no_grad():
            self.kept.copy_(x * 2)
        return hidden, self.kept


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden) + scale
        return out


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_that_computes_into_an_attribute_emits_copies_of_it(schedule: str) -> None:
    torch.manual_seed(0)
    options = {"microbatches": 4, "loss_fn": F.mse_loss, "schedule": schedule}
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    found = penstock.parity([EmitsItsMemory(0), Adds()], x, target=y, pipeline=options)
    assert found.output == 0.0


def test_memory_that_a_stage_emits_only_later_and_writes_to_is_an_error_and_no_wrong_number() -> None:
    """What its first forward did not do, nobody looks for again; the version of the memory shows the write."""
    stages: list[nn.Module] = [EmitsItsMemory(1), Adds()]
    pipe = penstock.Pipeline(stages, microbatches=4, schedule="gpipe", loss_fn=F.mse_loss)
    with pytest.raises(PeerFailure, match=r"return a copy \(.clone\(\)\) of it|written to in place"):
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
