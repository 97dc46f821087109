"""Batches whose sizes change at every step: what is remembered of them is bounded.

An hour of such steps made every process larger. Most of that was torch's: oneDNN keeps what it compiled for 1024
shapes (docs/guides/out-of-memory.md). These grew, too: links of `torch.distributed` kept up to 1024
layouts of messages with up to four packing buffers each, shared memory 1024 layouts on each end, threads a note of
each change between training and evaluation, replayed and captured models what they had found out about each shape,
without end. What is held is counted here, in objects.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F
from transport_harness import run, values

import penstock
from penstock.model import lru_cache
from penstock.model.lru_cache import LruCache
from penstock.runtime.transport import Channel
from penstock.runtime.transport.layout.layout import Frame, Layout
from penstock.runtime.transport.threads import ThreadTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]
FORTH, BACK = 0, 1


def held(kind: type) -> list[Any]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is kind]


def talks_of_ever_new_sizes(transport: Any, sizes: int) -> tuple[int, int]:
    """Each size in two steps, so that the second goes as predicted. How many layouts and packing buffers are left."""
    transport.open(CHANNELS)
    mine, peers = (FORTH, BACK) if transport.rank == 0 else (BACK, FORTH)
    for step in range(2 * sizes):
        size = 1 + step // 2
        transport.send(mine, 0, torch.full((size,), float(step)))
        assert transport.receive(peers, 0).tolist() == [float(step)] * size
        transport.flush()
        transport.exchange(None)
    return len(held(Layout)), len(held(Frame))


@pytest.mark.parametrize("kind", mostly_slow(["distributed", "shared"], "shared"))
def test_transports_remember_so_many_layouts(kind: str) -> None:
    layouts, sizes = 256, 300
    for found, frames in values(run(kind, talks_of_ever_new_sizes, sizes=sizes)):
        assert 0 < found <= layouts
        assert frames <= 10


def test_threads_forget_which_channels_all_ranks_have_opened() -> None:
    group = ThreadTransport.group(2)
    for turn in range(50):
        for transport in group:
            transport.open(CHANNELS[: 1 + turn % 2])
    assert not group[0]._board.opened


class Residual(nn.Module):
    """A stack neither of stages nor of a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def trained(way: str) -> tuple[list[Tensor | None], int]:
    """The gradients of steps of changing lengths, and of how many kinds of microbatches anything is known then."""
    torch.manual_seed(0)
    model, before = Residual(), {id(each) for each in held(LruCache)}
    options: dict[str, Any] = {
        "stages": 2,
        "microbatches": 2,
        "loss_fn": F.mse_loss,
        "cut_options": penstock.CutOptions(method=way),
    }
    with penstock.Pipeline(model, example=(torch.ones(1, 3, 4),), **options) as pipe:
        for length in [*range(2, 10), 2, 9]:
            x = torch.randn(2, length, 4)
            pipe.step(x, target=2 * x)
        known = max(len(each) for each in held(LruCache) if id(each) not in before)
    return [parameter.grad for parameter in model.parameters()], known


@pytest.mark.parametrize("way", mostly_slow(["replay", "graph"], "replay"))
def test_models_remember_so_many_kinds_of_microbatches(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, known = trained(way)
    assert known >= 8
    monkeypatch.setattr(lru_cache, "KINDS", 3)
    found, known = trained(way)
    assert known == 3
    for one, other in zip(found, whole, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
