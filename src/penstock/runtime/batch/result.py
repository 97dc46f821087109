"""What a step or an evaluation gives back; outputs of microbatches become one again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import dims_of_leaves


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation returns: the same on every rank, except for `output`.

    Attributes:
        loss: The loss of the whole batch, over all replicas. It has no graph: gradients are already computed.
        losses: One loss per microbatch of this replica, in order.
        extra_losses: The mean of each loss that stages passed to `add_loss`, by name.
        output: The model's output for the batch, if it was asked for, on the rank of the last stage.
    """

    loss: Tensor | None  # of the whole batch, over all replicas
    losses: tuple[Tensor, ...] = ()  # of each microbatch of this replica, by its number
    extra_losses: Mapping[str, float] = field(default_factory=dict)  # what stages gave to add_loss
    output: Any = None  # merged, where asked for, on the rank of the last stage


class _Value(Tensor):
    """A loss to look at: in all but `backward()` a plain tensor, which is what any operation makes of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this loss is a number without a graph: step() has computed all gradients already, so call "
            "optimizer.step() next; evaluate() computes none"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def loss_values(values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Losses that know why they have no backward."""
    return tuple(value.as_subclass(_Value) for value in values)


# -- outputs

PAD = "pad them to one size in the model, or take them as a list with BatchOptions(dims={'output': None})"


def merge(outputs: Sequence[Any], dim: Any = 0, remedy: str = PAD) -> Any:
    """Outputs of all microbatches as one: tensors joined along `dim` (one number, or one for each leaf), scalars
    stacked. A leaf that has no rows (None), or is no tensor, is itself where all agree, else the list of all.

    `remedy` is what the error says to do about tensors of different sizes.
    """
    leaves, specs = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise ModelError(
            f"microbatches gave outputs of different structure ({_structure(outputs)}), which cannot be merged into "
            f"one; return the same for every microbatch, or leave outputs=True out"
        )
    dims = dims_of_leaves("output", dim, outputs[0], len(leaves[0]))
    joined = [_join(column, at, remedy) for column, at in zip(zip(*leaves, strict=True), dims, strict=True)]
    return pytree.tree_unflatten(joined, specs[0])


def _structure(outputs: Sequence[Any]) -> str:
    found = dict.fromkeys(str(pytree.tree_map(lambda leaf: type(leaf).__name__, output)) for output in outputs)
    return " and ".join(list(found)[:2])


def _join(column: Sequence[Any], dim: int | None, remedy: str) -> Any:
    first = column[0]
    if isinstance(first, Tensor) and dim is not None:
        shapes = [tuple(value.shape) for value in column]
        others = {(*shape[:dim], *shape[dim:][1:]) for shape in shapes}
        if len(others) > 1:
            raise ModelError(
                f"microbatches gave outputs of shapes {', '.join(map(str, dict.fromkeys(shapes)))}, which cannot be "
                f"joined along dimension {dim}; {remedy}"
            )
        return torch.stack(tuple(column)) if first.dim() == 0 else torch.cat(tuple(column), dim)
    same = torch.equal if isinstance(first, Tensor) else operator.eq
    return first if all(same(value, first) for value in column) else list(column)
