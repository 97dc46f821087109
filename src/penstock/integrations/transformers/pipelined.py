"""A pipeline in the place where a Trainer expects its (wrapped) model.

The loop of a Trainer asks its model for parameters, modes, zero_grad and load_state_dict. On processes the model itself
has no values for what other ranks hold, so these questions go to the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import nn

from penstock.integrations.model_state import Misfits, load_own
from penstock.pipeline import Pipeline

__all__ = ["Pipelined"]


class Pipelined(nn.Module):
    """A model and the pipeline that runs it; its parameters are this process's."""

    def __init__(self, model: nn.Module, pipe: Pipeline) -> None:
        super().__init__()
        self.module, self.pipe = model, pipe

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of the stages in this process; a tied one goes by its first name in the model."""
        first = self.pipe.state.first_names()
        for name, parameter in self.pipe.named_parameters():
            yield first.get(name, name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.pipe.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pipe.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Misfits:
        """Take this process's part of a model's state, or of one file of it."""
        return load_own(self.pipe, state_dict)
