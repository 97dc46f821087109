"""A LightningModule's steps as the forward of a model that can be cut.

`training_step` is code of the user: it calls submodules, computes a loss and logs numbers. Run as a forward, it is cut
like any other; its output, on the last stage, is the loss and what was logged. So a LightningModule needs no change.
What the microbatches have logged becomes numbers of the batch. A batch of the data shows how to cut the module, before
Lightning has set up its loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from penstock.errors import UsageError
from penstock.integrations.accumulation import first_rows
from penstock.pipeline import StepResult

Logged = dict[str, tuple[Any, dict[str, Any]]]  # name -> a number, and the options of log()
Number = tuple[float, str, dict[str, Any]]  # a value, the name of its dtype, and the options of log()

# What the running step has logged. It is not in the module, whose state is watched.
_now: ContextVar[Logged] = ContextVar("logged")
TRAINING = "training_step"
PLAIN = (bool, int, float, str, type(None))


class ModuleSteps(nn.Module):
    """A model whose forward is one of the steps of a LightningModule."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, batch: Any, *rest: Any) -> dict[str, Any]:
        logged: Logged = {}
        token = _now.set(logged)
        try:
            output = getattr(self.module, step)(batch, *rest)
        finally:
            _now.reset(token)
        if step != TRAINING:
            return {"output": output, "logged": logged}
        return {"loss": output.get("loss") if isinstance(output, Mapping) else output, "logged": logged}


def follow_log(module: LightningModule) -> None:
    """Send what the module logs inside a step with the step's output, and later to Lightning's own `log`."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        logged = _now.get(None)
        if logged is None:
            type(module).log(module, name, value, *args, **options)
            return
        if args:
            raise UsageError(f"log({name!r}, ...): pass options by keyword, such as prog_bar=True")
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
        elif not isinstance(value, (int, float)):
            raise UsageError(
                f"log({name!r}) was given a {type(value).__name__}; inside a step of a pipeline, log a number or a "
                f"tensor of one: the ranks have no metric in common"
            )
        strange = [key for key, option in options.items() if not isinstance(option, PLAIN)]
        if strange:
            raise UsageError(f"log({name!r}, {strange[0]}=...): inside a step of a pipeline, options are plain values")
        logged[name] = (value, options)

    module.__dict__["log"] = log


def number_of(value: Any, options: dict[str, Any]) -> Number:
    """Convert a logged value to what goes to the other ranks."""
    dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
    return float(value), str(dtype).removeprefix("torch."), options


def joined_logs(result: StepResult, batch: Any, count: int) -> dict[str, Number]:
    """Join, by name, what was logged of the whole batch.

    The loss is the batch's own; any other number is the mean over microbatches, each by its rows.
    """
    losses = [float(each) for each in result.losses]
    rows = [len(piece) for piece in torch.arange(rows_of(batch), device="cpu").tensor_split(count)]
    found = {}
    for name, (value, options) in result.output["logged"].items():
        each_value = value if isinstance(value, list) else [value] * count
        values = [float(each) for each in each_value]
        if values == losses and result.loss is not None:
            number = float(result.loss)
        else:
            number = sum(each * size for each, size in zip(values, rows, strict=True)) / sum(rows)
        sizes = options.get("batch_size")
        if sizes is not None:
            options = {**options, "batch_size": sum(sizes) if isinstance(sizes, list) else sizes * count}
        found[name] = (number, *number_of(each_value[0], options)[1:])
    return found


def example_batch(trainer: Trainer, rows: int) -> Any:
    """Return the first rows of what the trainer is about to run on; random numbers stay as they were."""
    loop: Any = trainer._active_loop
    loader: Any = loop._data_source.dataloader()
    while isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the model is cut with a batch of its data, and a {type(loader).__name__} cannot provide one; pass "
            f"PipelineStrategy(example=batch), with a batch as a step gets it"
        )
    return first_rows(loader.dataset, rows, loader.collate_fn)


def rows_of(batch: Any) -> int:
    """Return how many rows a batch has: its first tensor's."""
    return next((len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
