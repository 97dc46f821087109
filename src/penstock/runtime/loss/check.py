"""Which batches a loss is to be checked on: whether the losses of their microbatches make the loss of the batch.

If they do not, the loss is a mean over something else, or a sum, or it compares rows with each other; then neither the
batch's loss nor its gradients would be those of the whole batch, and that is an error with both numbers (`pair_check`).
All neighbours of a pipeline's first step are asked, and again in a step whose batch is of another kind: other shapes,
or the first in which microbatches differ in how much of a target or a mask is 0, negative or nan, or in its mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.runtime.batch.microbatch import Batch, Dims
from penstock.runtime.loss.pair_check import PairCheck

if TYPE_CHECKING:
    from penstock.runtime.loss.shares import BatchShares, Weighing

Label = tuple[str, str | int, int]  # where in a microbatch: the field, the name or position there, the leaf
Mark = tuple[Label, str]  # a tensor of the batch, and a kind of mark that counts there
UNEVEN = 1e-6  # above what sums of the same numbers differ by
KINDS = 16  # of batches by their shapes; where these change at every step, they are not asked for ever


class LossChecks:
    """What has been asked of one pipeline's loss."""

    def __init__(self, loss_fn: Callable[..., Any] | None, weighing: Weighing, dims: Dims) -> None:
        self.loss_fn, self.weighing, self.dims = loss_fn, weighing, dims
        self._off = weighing.options.per_microbatch or weighing.is_known
        self._asked: set[Hashable] = set()
        self._said = False
        self._uneven: set[Mark] = set()  # what was not alike in all microbatches when it was asked

    def begin(self, batch: Batch, shares: BatchShares) -> PairCheck | None:
        """The check of a step that needs one."""
        if self._off or len(batch.args) < 2:
            return None
        shapes = _shapes(batch) if len(self._asked) < KINDS else ()
        uneven = uneven_marks(batch)
        if shapes in self._asked and uneven <= self._uneven:
            return None
        return PairCheck(self, batch, shares, shapes, uneven)

    def passed(self, shapes: Hashable, uneven: set[Mark]) -> None:
        """A batch of this kind needs no further check."""
        self._asked.add(shapes)
        self._uneven |= uneven

    def cannot_tell(self, why: str) -> None:
        """Say so, once."""
        if not self._said:
            self._said = True
            warnings.warn(
                f"whether the losses of microbatches add up to the loss of the batch could not be checked: {why}. If "
                f"it is neither a mean over rows nor a cross-entropy, see LossOptions(weight=) and (reduction=); "
                f"LossOptions(per_microbatch=True) confirms that it is as you mean it",
                stacklevel=2,
            )


def _shapes(batch: Batch) -> Hashable:
    leaves = pytree.tree_leaves((batch.args[0], batch.kwargs[0], batch.targets[0], batch.loss_kwargs[0]))
    return tuple((leaf.dtype, leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))


# -- what in a batch may say how much of it counts


def uneven_marks(batch: Batch) -> set[Mark]:
    """What may say what counts, and some microbatches have more of than others."""
    found: set[Mark] = set()
    for place, _ in telling(batch, 0):
        pieces = [at(batch, number, place) for number in range(len(batch.args))]
        if all(isinstance(piece, Tensor) for piece in pieces):
            for kind, shares in marks([piece.detach().reshape(-1) for piece in pieces]).items():
                if max(shares) - min(shares) > UNEVEN * max(map(abs, shares)):
                    found.add((place, kind))
    return found


def marks(pieces: list[Tensor]) -> dict[str, list[float]]:
    """By kind of mark, the share of each piece's entries that have it: what often means "ignored", or how much counts.

    That is 0 in masks and of padding, numbers below 0, 255 in images, nan; and the mean, of weights and lengths.
    """
    flat = torch.cat(pieces)
    if flat.is_meta:
        return {}
    found = {"0": flat == 0}
    if flat.is_floating_point():
        found |= {"nan": flat.isnan(), "mean": flat.nan_to_num()}
    else:
        found |= {"below 0": flat < 0, "255": flat == 255, "mean": flat}
    sizes = [max(1, piece.numel()) for piece in pieces]
    return {
        kind: [total / size for total, size in zip(sums(each, pieces), sizes, strict=True)]
        for kind, each in found.items()
    }


def sums(flat: Tensor, pieces: list[Tensor]) -> list[float]:
    """The sum of each piece's part of a tensor that has all pieces in a row."""
    found: list[float]
    if len({piece.numel() for piece in pieces}) == 1:
        found = flat.view(len(pieces), -1).sum(1, dtype=torch.float64).tolist()
        return found
    ends = torch.cat([flat.new_zeros(1, dtype=torch.float64), flat.cumsum(0, dtype=torch.float64)])
    offsets = torch.tensor([0, *(piece.numel() for piece in pieces)], device="cpu").cumsum(0).to(flat.device)
    found = ends[offsets].diff().tolist()
    return found


def at(batch: Batch, number: int, place: Label) -> Any:
    """One leaf of a microbatch; None where it has no such leaf."""
    field, name, leaf = place
    if field == "target":
        value = batch.targets[number]
    elif field == "args":
        args = batch.args[number]
        value = args[name] if isinstance(name, int) and name < len(args) else None
    else:
        value = getattr(batch, field)[number].get(name)
    leaves = [value] if type(value) is Tensor else pytree.tree_leaves(value)
    return leaves[leaf] if leaf < len(leaves) else None


def integers(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    """The tensors of whole numbers in a microbatch; those that are likely to be targets first."""
    return ((place, each) for place, each in _tensors(batch, number) if not each.is_floating_point())


def telling(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    """The tensors of a microbatch that may say what counts: whole numbers, and of fractions what a loss is told."""
    for place, each in _tensors(batch, number):
        field, name, _ = place
        told = field in ("target", "loss_kwargs") or any(word in str(name) for word in ("label", "mask", "weight"))
        if told or not each.is_floating_point():
            yield place, each


def _tensors(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    named = [("loss_kwargs", name, value) for name, value in batch.loss_kwargs[number].items()]
    kwargs = sorted(batch.kwargs[number].items(), key=lambda each: not _sounds_like_target(each[0]))
    named += [("kwargs", name, value) for name, value in kwargs]
    fields: list[tuple[str, str | int, Any]] = [("target", "target", batch.targets[number]), *named]
    fields += [("args", place, value) for place, value in reversed(list(enumerate(batch.args[number])))]
    for field, name, value in fields:
        for leaf, each in enumerate(pytree.tree_leaves(value)):
            if isinstance(each, Tensor) and each.dim() and not each.is_complex():
                yield (field, name, leaf), each


def _sounds_like_target(name: str) -> bool:
    return any(word in name for word in ("label", "target"))
