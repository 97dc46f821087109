"""A loss function with parameters of its own, as a part of the last stage: what it holds, and under which names.

A learned weight of a loss is trained like any other parameter: it belongs into the optimizer, into norms, into
checkpoints, and its gradient has to be added over replicas. An `nn.Module` says what it holds. What a plain function
has in its closure, nobody can tell from outside: see `foreign_leaves`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from penstock.errors import ModelError
from penstock.model.part import state_names
from penstock.model.staged_model import Holding, StagedModel

LOSS = "loss_fn"  # what the names of its parameters and buffers begin with


def loss_holding(loss_fn: Callable[..., Any] | None, split: StagedModel) -> Holding | None:
    """What the loss holds beside the stages, if it holds anything."""
    module = module_of(loss_fn)
    if module is None:
        return None
    held = {id(tensor) for part in split.parts for tensor in (*part.module.parameters(), *part.module.buffers())}
    trained = any(id(parameter) not in held for parameter in module.parameters())
    kept = any(id(buffer) not in held for buffer in module.buffers())
    if not trained and (constants_of(loss_fn) is not None or not kept):
        return None
    names = {name: f"{LOSS}.{name}" for name in state_names(module)}
    taken = sorted({name for part in split.parts for name in part.names.values()} & set(names.values()))
    if taken:
        raise ModelError(
            f"the model has {', '.join(taken[:3])}, and {LOSS}= has parameters or buffers that would be called the "
            f"same; rename that submodule of the model"
        )
    return Holding(split.stages - 1, module, names)


def constants_of(loss_fn: Any) -> nn.Module | None:
    """Return a loss of torch, which keeps the weights that it was made with, such as those of classes."""
    module = module_of(loss_fn)
    return module if type(module).__module__ == "torch.nn.modules.loss" else None


def module_of(loss_fn: Any) -> nn.Module | None:
    """The module that a loss function is, or a method of."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    owner = getattr(loss_fn, "__self__", loss_fn)  # of a method
    return owner if isinstance(owner, nn.Module) else None


class StageAndLoss(nn.Module):
    """The last stage's module and that of the loss as one: what its forwards may read and write."""

    def __init__(self, stage: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.stage, self.loss = stage, loss

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Those of both, also where the stage has more than its tree."""
        yield from self.stage.modules()
        yield from self.loss.modules()

    def own_modules(self) -> Iterator[nn.Module]:
        """Those whose state is this stage's."""
        yield from getattr(self.stage, "own_modules", self.stage.modules)()
        yield from self.loss.modules()

    def running_modules(self) -> Iterator[nn.Module]:
        """The same, with what runs in the place of what it stands for."""
        yield from getattr(self.stage, "running_modules", self.stage.modules)()
        yield from self.loss.modules()
