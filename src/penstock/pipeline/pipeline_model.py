"""What a pipeline offers of its model, beside training it: parameters, gradients, state, and files for other libraries.

All of it goes by the model's own names. `ModelState` does the work; here are the calls as users make them, which first
wait for steps that are under way where that matters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from penstock.pipeline.model_state.save_pretrained import save_pretrained
from penstock.pipeline.model_state.state import ModelState
from penstock.pipeline.steps import Steps


class PipelineModel:
    """The model of a pipeline, of which this process has some stages."""

    state: ModelState
    steps: Steps

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs of (name, parameter) for the stages that this process owns, each parameter once."""
        return self.state.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process, for its optimizer. Never empty: torch's optimizers refuse that."""
        return self.state.parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Pairs of (name, buffer) for the stages that this process owns, each buffer once."""
        return self.state.named_buffers()

    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Group this process's parameters for a torch optimizer, by name.

        Args:
            rules: A dict of name patterns to options, such as `{"*.bias": {"weight_decay": 0.0}}`. The first pattern
                that matches decides; what matches none is in a last group.
        """
        return self.state.parameter_groups(rules)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the stages that this process owns, under the model's own names."""
        self.steps.settle()
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's part of a whole model's state.

        Args:
            state: The state of the whole model, or of a part that has all that this process owns. A name that no stage
                has is an error.
        """
        self.steps.settle()
        self.state.load_state_dict(state)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state of the whole model, as a copy on the CPU. Call it on every rank.

        Args:
            rank: The rank that gets the state; the others get an empty dict. By default, every rank gets it.
        """
        self.steps.check_open()
        return self.state.full_state_dict(rank)

    def full_tensors(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the whole model, one tensor at a time. Every rank calls it and walks through all of it.

        The order is the same on all ranks. Each tensor is a copy on the CPU, whole where it is sharded or spread over
        ranks; a tied parameter comes once, under its first name. A rank never holds more than a few of them.

        Args:
            rank: The rank that gets the tensors; on the others the loop ends without any. By default, every rank
                gets them.

        Yields:
            Pairs of (name, tensor), under the model's own names.
        """
        self.steps.check_open()
        return self.state.full_tensors(rank)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        max_shard_size: int = 5_000_000_000,
        merge_adapters: bool = False,
    ) -> None:
        """Write the model as a folder that transformers' `from_pretrained` loads. Call it on every rank.

        Each rank writes the tensors of its own stages, one at a time. The folder is there when it is complete, or not
        at all, and an error on one rank is raised on all. A model with peft's adapters is saved as these adapters,
        in peft's format.

        Args:
            folder: The folder to write; it must not be there yet. With several hosts, on a file system they share.
            tokenizer: A tokenizer with `save_pretrained`, or the folder of one. By default, the tokenizer that lies
                in the folder the model was loaded from, if there is one.
            max_shard_size: The most bytes that one file holds.
            merge_adapters: Whether to add adapters to the weights and save a model without adapters.
        """
        self.steps.check_open()
        self.state.check_values()
        save_pretrained(self.state, Path(folder), tokenizer, max_shard_size, merge_adapters)

    def fill_model(self, rank: int | None = None) -> None:
        """Give the original model all its values again, until the next step. Call it on every rank.

        Args:
            rank: The rank whose model is filled. By default, every rank's.
        """
        self.steps.check_open()
        self.state.fill_model(rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this process's parameters.

        Args:
            set_to_none: Whether `.grad` becomes `None`, as in torch, or a tensor of zeros.
        """
        self.state.zero_grad(set_to_none)

    def grad_norm(self, norm_type: float | str = 2.0, foreach: bool | None = None) -> Tensor:
        """The norm of all gradients of the whole model, the same on every rank. Changes nothing; call it on every rank.

        Args:
            norm_type: The order of the norm, such as 2.0 or `"inf"`.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.
        """
        return self.state.grad_norm(norm_type, foreach)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients of the whole model so that their norm is at most `max_norm`. Call it on every rank.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: The order of the norm, such as 2.0 or `"inf"`.
            error_if_nonfinite: Whether a norm that is inf or NaN raises an error.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.

        Returns:
            The norm before clipping, the same on every rank.
        """
        return self.state.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamp every entry of this process's gradients to the range from -`clip_value` to `clip_value`.

        Args:
            clip_value: The largest absolute value.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.
        """
        self.state.clip_grad_value_(clip_value, foreach)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or out of it, as its own `train` does.

        Args:
            mode: Whether to train (True) or evaluate (False).
        """
        self.state.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into eval mode."""
        return self.train(False)
