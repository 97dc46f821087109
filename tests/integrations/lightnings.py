"""What the tests of the Lightning integration train: a small net in double precision, unmodified by the pipeline."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from penstock.integrations.lightning import PipelineCheckpointIO, PipelineStrategy

__all__ = ["EarlyStopping", "ModelCheckpoint", "PipelineCheckpointIO", "PipelineStrategy", "pl"]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)


class Net(pl.LightningModule):
    """Tokens to tokens; some targets are ignored, so that microbatches count differently."""

    def __init__(self, dropout: float = 0.0, scheduled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scheduled = scheduled
        self.inner = nn.Sequential(
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 20),
        )
        self.double()
        self.heard: list[Any] = []

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, target = batch
        loss = token_loss(self(ids), target)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, target = batch
        logits = self(ids)
        self.log("val_loss", token_loss(logits, target))
        self.log("val_right", (logits.argmax(-1) == target).double().sum(), reduce_fx="sum", batch_size=len(ids))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_backward(self, loss: Tensor) -> None:
        self.heard.append(loss.item())

    def configure_optimizers(self) -> Any:
        decayed = [each for each in self.parameters() if each.dim() > 1]
        others = [each for each in self.parameters() if each.dim() < 2]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if not self.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def loader(rows: int, seed: int = 0, shuffle: bool = False, batch: int = 4, sampled: bool = False) -> DataLoader[Any]:
    """`sampled`: in the order in which Lightning shuffles for replicas."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (rows, 5), generator=made)
    target = torch.randint(0, 20, (rows, 5), generator=made)
    for row in range(rows):
        target[row, : row % 4] = -1
    data = TensorDataset(ids, target)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0) if sampled else None
    return DataLoader(data, batch_size=batch, shuffle=shuffle, sampler=sampler)


def trainer(folder: str | Path, **changes: Any) -> pl.Trainer:
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
        "default_root_dir": str(folder),
    }
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    return pl.Trainer(**{**usual, **changes})


class Losses(pl.Callback):
    """The loss of every training step, and what was logged at the end of each epoch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def as_torchrun() -> None:
    """What torchrun sets: the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="of the tests")
