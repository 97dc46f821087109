"""Small training runs for the tests of checkpoints: the same model in any layout, one step at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b of 4": {"stages": 4, "schedule": "1f1b"},
    "one stage": {"stages": 1, "schedule": "gpipe"},
    "two stages": {"stages": 2, "schedule": "gpipe"},
    "three stages": {"stages": 3, "schedule": "1f1b"},
    "interleaved": {"stages": 6, "ranks": 3, "schedule": "interleaved-1f1b"},
    "zb-v": {"stages": 8, "ranks": 4, "schedule": "zb-v"},
}


class Net(nn.Module):
    """Tied ends, a buffer that training changes, dropout: replayed, so that masks do not depend on the cut."""

    def __init__(self, tied: bool = True, plain: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(7)
        )
        if plain:  # as many buffers, but nothing that depends on which rows are together
            for block in self.blocks:
                block[1].momentum, block[1].training = 0.0, False
                block[1].requires_grad_(False)
                block[3].p = 0.0
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Data:
    """Batches by their position, drawn from a generator of its own."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        return torch.randint(0, 12, (8, 6), generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """A pipeline and all that a training loop has around it."""

    def __init__(
        self,
        seed: int = 0,
        optimizer: Any = torch.optim.AdamW,
        tied: bool = True,
        plain: bool = False,
        microbatches: int = 4,
        **layout: Any,
    ) -> None:
        torch.manual_seed(seed)
        example = (torch.zeros(2, 6, dtype=torch.int64),)
        self.pipe = penstock.Pipeline(
            Net(tied, plain), microbatches=microbatches, loss_fn=loss_of, example=example, **layout
        )
        decayed = [p for _, p in self.pipe.named_parameters() if p.dim() > 1]
        others = [p for _, p in self.pipe.named_parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = optimizer([group for group in groups if group["params"]], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.data = Data()

    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.data}

    def step(self) -> float:
        batch = self.data.next()
        loss = self.pipe.step(batch, target=batch).loss
        self.pipe.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def close(self) -> None:
        self.pipe.close()
