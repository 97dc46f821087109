"""The losses of microbatches, what enters the backward at each, and losses from inside stages.

A loss comes from the loss function or from the model itself. What it was divided by is read off its graph (`reading`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.runtime.batch.microbatch import Batch

if TYPE_CHECKING:
    from penstock.runtime.loss.check import StepCheck
    from penstock.runtime.loss.shares import Shares


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
        self,
        batch: Batch,
        loss_fn: Callable[..., Any] | None,
        shares: Shares,
        begin_check: Callable[[], StepCheck | None] | None,
        training: bool,
        scale: float,
        replicas: int,
    ) -> None:
        self._batch, self._loss_fn, self._shares, self._begin_check = batch, loss_fn, shares, begin_check
        self.check: StepCheck | None = None  # once a loss has come that has to be checked
        self._training = training
        self.seeds = Seeds(shares, len(batch.args), scale, replicas)
        # in an inference that has nothing to compare with, there is no loss
        self.are_wanted = loss_fn is None or training or batch.has_target

    def of(self, microbatch: int, output: Any) -> Tensor | None:
        """The loss of one microbatch, from its output; None where an inference gives none."""
        target, extra, shares = self._batch.targets[microbatch], self._batch.loss_kwargs[microbatch], self._shares
        if self._loss_fn is None:  # a scalar output is the loss
            loss = own_loss(output)
            loss = loss if isinstance(loss, Tensor) and loss.dim() == 0 else None
        elif not self._training and shares.wants_graph:
            loss = _with_graph(self._loss_fn, output, target, extra)
        else:
            loss = self._loss_fn(output, target, **extra)
        if isinstance(loss, Tensor):
            self._look(microbatch, output, loss)
        return None if loss is None else check_loss(loss)

    def _look(self, microbatch: int, output: Any, loss: Tensor) -> None:
        """Read what a loss was divided by, and have it checked; one of torch's own over entries is right as it is."""
        target, extra, shares = self._batch.targets[microbatch], self._batch.loss_kwargs[microbatch], self._shares
        tensors = shares.is_elementwise and isinstance(output, Tensor) and isinstance(target, Tensor)
        is_right = tensors and output.shape == target.shape and not extra
        if is_right and shares.measure is not None:
            return
        form = shares.read(microbatch, output, loss)
        if is_right:
            return
        if self._begin_check is not None:
            self.check, self._begin_check = self._begin_check(), None
        if self.check is not None:
            self.check.saw(microbatch, output, loss, form)


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
    several = sum(map(_is_scalar, output)) if isinstance(output, (tuple, list)) else 0
    shape += f" with {several} scalars" if several else ""
    beside = "" if target is None else " (a target alone computes none)"
    labels = hasattr(output, "loss") or (isinstance(output, Mapping) and "loss" in output)
    labels |= isinstance(output, (tuple, list)) and any(each is None for each in output)
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
    """Return what is the loss without a loss_fn: the output, what it has by that name, or its only scalar.

    Hugging Face's models return it by name; many models beside, in a tuple of logits and loss.
    """
    if isinstance(output, Mapping):
        return output.get("loss", output)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    scalars = [each for each in output if _is_scalar(each)] if isinstance(output, (tuple, list)) else []
    return scalars[0] if len(scalars) == 1 else output


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


# -- what enters the backward, and the sum that losses make


class Seeds:
    """What enters the backward at each microbatch's loss: its share, as a tensor like the loss.

    All of them are made at once, when the first loss shows its kind: one by one they cost more than a small backward.
    A microbatch without a share takes no part: its own mean may well be nan, and 0 * nan would reach the weights.
    """

    def __init__(self, shares: Shares, count: int, scale: float = 1.0, replicas: int = 1) -> None:
        self._shares, self._scale = shares, scale
        self.made: dict[tuple[torch.dtype, torch.device], tuple[Tensor | None, ...]] = {}  # by the kind of loss
        self._of_named = scale / (count * replicas)

    def of(self, microbatch: int, loss: Tensor) -> Tensor | None:
        """The seed of one loss; None where it does not count."""
        kind = loss.dtype, loss.device
        if kind not in self.made:
            shares = self._shares.if_counts(microbatch)
            if shares is None:
                return None
            scaled = [share * self._scale for share in shares]
            made: Sequence[Tensor]
            if loss.device.type == "cpu":
                made = torch.tensor(scaled, dtype=torch.float64, device="cpu").to(loss.dtype).unbind()
            else:
                made = [loss.new_full((), share) for share in scaled]  # which does not wait for the device
            self.made[kind] = tuple(seed if share else None for seed, share in zip(made, shares, strict=True))
        return self.made[kind][microbatch]

    @cached_property
    def extra(self) -> Tensor:
        """At a named loss, which is a mean over the microbatches of all replicas."""
        return torch.tensor(self._of_named, dtype=torch.float64, device="cpu")


def fetch(tensors: list[Tensor]) -> dict[int, float]:
    """Bring numbers to the host, by the id of each tensor; those on a device with one copy of the bytes of all."""
    found = {id(each): float(each.item()) for each in tensors if each.device.type == "cpu"}
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for each in tensors:
        if each.device.type != "cpu":
            kinds.setdefault((each.dtype, each.device), []).append(each)
    if kinds:
        _, there = next(iter(kinds))
        packed = [torch.stack([each.detach() for each in same]).view(torch.uint8) for same in kinds.values()]
        together = torch.cat([each.flatten().to(there) for each in packed]).cpu()
        parts = torch.split(together, [each.numel() for each in packed])
        for (dtype, _), same, part in zip(kinds, kinds.values(), parts, strict=True):
            # A copy begins where numbers of this size may stand.
            numbers = part.clone().view(dtype).tolist()
            found |= {id(each): float(number) for each, number in zip(same, numbers, strict=True)}
    return found


def sum_in_order(losses: Tensor, shares: Sequence[float]) -> float:
    """Add the losses, which are on the host, with the bits of a plain loop: `total = total + loss * share`.

    In Python's numbers, because 64 operations on tensors of one element cost more than the step's exchange. These are
    doubles; of two floats, the sum in doubles, rounded once more, is the floats' own (53 bits >= 2 * 24 + 2).
    """
    counted = [number for number, share in enumerate(shares) if share != 0]
    if losses.dtype not in (torch.float32, torch.float64):
        terms = [losses[number] * shares[number] for number in counted]
        return sum(terms[1:], terms[0]).item() if terms else 0.0
    rounded: Callable[[float], float] = _as_float if losses.dtype is torch.float32 else float
    result: float | None = None
    weighted: list[float] = (losses * torch.tensor(shares, dtype=losses.dtype, device=losses.device)).tolist()
    for number in counted:
        result = weighted[number] if result is None else rounded(result + weighted[number])
    return 0.0 if result is None else result  # all 0: it is other replicas' batches that count


def _as_float(value: float) -> float:
    return c_float(value).value


# -- torch's own losses


def torch_reduction(loss_fn: Any, more: Mapping[str, Any]) -> str | None:
    """How one of torch's losses reduces, with the keywords that it is called with; None of any other loss."""
    function, options = unwrapped(loss_fn)
    if isinstance(function, nn.modules.loss._Loss):
        return function.reduction if type(function).__module__ == nn.modules.loss.__name__ else None
    name = getattr(function, "__name__", "")  # which a decorated function has, too
    if getattr(F, name, None) is not function or not (
        name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    ):
        return None
    options = {**options, **more}
    if options.get("size_average") is not None or options.get("reduce") is not None:  # as in torch 0.4
        return None
    reduction: str = options.get("reduction", "mean")
    return reduction


ELEMENTWISE = frozenset({
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss",
    "SoftMarginLoss",
})  # fmt: skip


def is_elementwise(loss_fn: Any) -> bool:
    """Return whether this is a mean or sum of torch's own over pairs of an entry and its target, with plain options."""
    function, options = unwrapped(loss_fn)
    name = getattr(function, "__name__", type(function).__name__)
    if name not in ELEMENTWISE or torch_reduction(loss_fn, {}) not in ("mean", "sum"):
        return False
    if isinstance(function, nn.Module):
        return type(function) is getattr(nn, name) and is_plain(function) and not any(True for _ in function.buffers())
    return not any(isinstance(value, Tensor) for value in options.values())


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of a module is the forward of its class, and nothing beside."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return not any(hooks) and "forward" not in vars(module)


def unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """What is called in the end, and the keywords that partial adds; compiled or not."""
    options: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, partial) and not loss_fn.args:
            options = {**loss_fn.keywords, **options}
            loss_fn = loss_fn.func
            continue
        inner = getattr(loss_fn, "_orig_mod", None) or getattr(loss_fn, "_torchdynamo_orig_callable", None)
        if inner is None:
            return loss_fn, options
        loss_fn = inner
