"""What the tests of the transformers integration train: a tiny Llama in double precision on made-up text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from penstock.integrations.transformers import PipelineTrainer
from penstock.integrations.transformers.loss import TrainerLoss

__all__ = ["AutoModelForCausalLM", "EarlyStoppingCallback", "PipelineTrainer", "TrainerLoss"]

logging.set_verbosity_error()
logging.disable_progress_bar()


class Text(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens; some labels are ignored, a different number in each row."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 32, (rows, 10), generator=made)
        self.labels = self.ids.clone()
        for row in range(rows):
            self.labels[row, : row % 5] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = LlamaConfig(**{**sizes, "num_attention_heads": 2, "max_position_embeddings": 32, **changes})
    return LlamaForCausalLM(config).double()


def arguments(folder: str | Path, **changes: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**usual, **changes})


def as_torchrun() -> None:
    """What torchrun sets, for accelerate: the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """What was logged, without what a clock said."""
    timed = ("runtime", "per_second", "preparation_time")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.state.log_history
    ]


class Heard(TrainerCallback):
    """How often each event came."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["step"] = self.count.get("step", 0) + 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count["evaluate"] = self.count.get("evaluate", 0) + 1
