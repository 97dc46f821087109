"""The loss of a microbatch, from a loss function or from the model itself, and losses from inside stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, RunError
from penstock.model.counted_runs import DRY, EVERYWHERE, run_kind
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.shares import Shares
from penstock.runtime.state.phase import NOW

if TYPE_CHECKING:
    from penstock.runtime.loss.check import PairCheck


def check_loss(loss: Any) -> Tensor:
    """The loss as a scalar tensor, or an error that says what it is instead."""
    if hasattr(loss, "full_tensor"):  # a DTensor: the ranks over which it is spread all need it
        loss = loss.full_tensor()
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ModelError(f"the loss is {what}; loss_fn(output, target) must return a scalar tensor, such as its mean")
    return loss


class StepLosses:
    """The losses of the microbatches of one step, on the rank of the last stage."""

    def __init__(
        self, batch: Batch, loss_fn: Callable[..., Any] | None, shares: Shares, check: PairCheck | None, training: bool
    ) -> None:
        self._batch, self._loss_fn, self._shares, self._check = batch, loss_fn, shares, check
        self._training = training

    def of(self, microbatch: int) -> Callable[[Any], Tensor | None] | None:
        """The loss as a function of the output; None in an inference that has nothing to compare with."""
        if self._loss_fn is not None and not (self._training or self._batch.has_target):
            return None
        return partial(self._loss_of, microbatch)

    def _loss_of(self, microbatch: int, output: Any) -> Tensor | None:
        target, extra = self._batch.targets[microbatch], self._batch.loss_kwargs[microbatch]
        if self._loss_fn is None:  # a scalar output is the loss
            loss = own_loss(output)
            loss = loss if isinstance(loss, Tensor) and loss.dim() == 0 else None
        elif not self._training and self._shares.wants_graph:
            loss = _with_graph(self._loss_fn, output, target, extra)
        else:
            loss = self._loss_fn(output, target, **extra)
        if isinstance(loss, Tensor):
            self._shares.saw(microbatch, loss)
            if self._check is not None:
                self._check.saw(microbatch, output, loss)
        return None if loss is None else check_loss(loss)


def trained_loss(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The loss of a training step, which must lead back to parameters: else `.grad` would stay empty without a word."""

    def loss_of(output: Any, target: Any, **extra: Any) -> Any:
        try:
            loss = own_loss(output) if loss_fn is None else loss_fn(output, target, **extra)
        except (TypeError, AttributeError, RuntimeError) as error:
            wrong = _misfit(error, output, target)
            if wrong is None:
                raise
            raise ModelError(f"{_called(loss_fn)} raised {type(error).__name__} ({error}): {wrong}") from error
        if loss_fn is None and loss is output and not (isinstance(loss, Tensor) and loss.dim() == 0):
            raise ModelError(_no_loss(output, target))
        if loss is None:
            raise ModelError(f"the loss from {_called(loss_fn)} is None, so nothing would be trained; return a scalar")
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ModelError(
                f"the loss ({loss.dtype}, from {_called(loss_fn)}) does not require grad, so nothing would be trained; "
                f"it must depend on the parameters, without detach() and in floating point"
            )
        return loss

    return loss_of


def _misfit(error: BaseException, output: Any, target: Any) -> str | None:
    """What is wrong with what a loss function could not take, where that can be seen."""
    if target is None:
        return "step() got no target on this rank, so loss_fn was called with target=None; pass target="
    outputs, targets = (
        [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)] for each in (output, target)
    )
    there, here = sorted({str(leaf.device) for leaf in outputs}), sorted({str(leaf.device) for leaf in targets})
    if there and here and not set(here) <= set(there):
        return f"the target is on {', '.join(here)}, the output on {', '.join(there)}; move it with target.to(...)"
    if isinstance(error, (TypeError, AttributeError)) and not targets:
        return f"the target is a {type(target).__name__} without tensors; pass a tensor, or pairs and dicts of tensors"
    if isinstance(error, (TypeError, AttributeError)) and not isinstance(output, Tensor):
        return f"the output is a {type(output).__name__}; pass a loss_fn that takes of it what the loss is of"
    if any(word in str(error) for word in ("dtype", "scalar type", "not implemented for", "be cast", "bool tensors")):
        kinds = [", ".join(sorted({str(leaf.dtype) for leaf in each})) for each in (targets, outputs)]
        return (
            f"the target is {kinds[0]}, the output {kinds[1]}; convert it, with target.long() "
            f"for classes and target.float() for values"
        )
    return None


def _no_loss(output: Any, target: Any) -> str:
    shape = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    beside = "" if target is None else " (a target alone computes none)"
    labels = hasattr(output, "loss") or (isinstance(output, Mapping) and "loss" in output)
    own = "its loss is None: pass what it computes it from, such as labels=" if labels else "pass loss_fn="
    return f"there is no loss_fn, and the model returned {shape}, which is no loss{beside}; {own}"


def _with_graph(loss_fn: Callable[..., Any], output: Any, target: Any, extra: Mapping[str, Any]) -> Any:
    """A loss of an evaluation with its graph, which says what it was divided by."""
    with torch.inference_mode(False), torch.enable_grad():

        def leaf(tensor: Tensor) -> Tensor:
            own = tensor.clone() if tensor.is_inference() else tensor.detach()
            return own.requires_grad_(own.is_floating_point() or own.is_complex())

        def data(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.is_inference() else tensor

        output = pytree.tree_map_only(Tensor, leaf, output)
        target, extra = pytree.tree_map_only(Tensor, data, (target, dict(extra)))
        return loss_fn(output, target, **extra)


def _called(loss_fn: Callable[..., Any] | None) -> str:
    return "the last stage" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)


def own_loss(output: Any) -> Any:
    """Without a loss_fn: the output is the loss, or carries it under that name (as Hugging Face models do)."""
    if isinstance(output, Mapping):
        return output.get("loss", output)
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else output


def add_loss(name: str, value: Tensor) -> None:
    """Add a loss from inside any stage's forward, such as a balance loss of experts.

    Its gradient flows, and `result.extra_losses` reports it on every rank. The batch's loss of that name is the mean
    over microbatches, whatever `LossOptions` says, and the sum over the calls within one microbatch.

    Args:
        name: The name to report it under.
        value: A tensor with one element.
    """
    kind = run_kind()
    if kind == DRY:
        return
    if kind == EVERYWHERE:
        raise ModelError(
            f"add_loss({name!r}) was called between the units of a model that is cut by its forward; every stage runs "
            f"that code, so the loss would count several times: call it in the forward of a submodule with parameters"
        )
    phase = NOW.phase
    if phase is None or phase.kind == "backward":
        raise RunError(f"add_loss({name!r}) was called outside of a pipeline's forward")
    if not isinstance(value, Tensor) or value.dim() != 0:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"add_loss({name!r}, ...) got {what}; give it a scalar tensor, such as value.mean()")
    phase.extra.append((name, value))
