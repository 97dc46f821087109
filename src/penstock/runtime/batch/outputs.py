"""The outputs of microbatches become the output of their batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.runtime.batch.microbatch import dims_of_leaves
from penstock.runtime.state.ownership import Watched, check_unwritten, versions
from penstock.runtime.transport.handover import alias

PAD = "pad them to one size in the model, or take them as a list with BatchOptions(dims={'output': None})"


class KeptOutputs:
    """The outputs of a step's microbatches, kept as they were made until they are joined."""

    def __init__(self) -> None:
        self._outputs: dict[int, Any] = {}  # By microbatch.
        self._watched: dict[int, Watched] = {}
        self._joined: Any = None

    def keep(self, microbatch: int, output: Any, attached: bool) -> None:
        """Keep the output of one microbatch; `attached`: with the graph behind it."""
        kept = pytree.tree_map(alias, output) if attached else pytree.tree_map_only(Tensor, Tensor.detach, output)
        self._outputs[microbatch], self._watched[microbatch] = kept, versions(kept)

    def join(self, join: Callable[[list[Any]], Any]) -> None:
        """Make one of all outputs; raise if one is not as it was when it was made."""
        for microbatch, watched in self._watched.items():
            check_unwritten(
                f"the output of microbatch {microbatch}", watched, "by a later one, since both are in the same memory"
            )
        if self._outputs:
            self._joined = join([self._outputs[number] for number in sorted(self._outputs)])
        self._outputs, self._watched = {}, {}

    def take(self) -> Any:
        """Return what was made of all outputs, if any were kept, and forget it."""
        found, self._joined = self._joined, None
        return found


def merge(outputs: Sequence[Any], dim: Any = 0, remedy: str = PAD) -> Any:
    """Join outputs of all microbatches: tensors along `dim` (one number, or one for each leaf), scalars stacked. A leaf
    that has no rows (None), or is no tensor, is itself where all agree, else the list of all.

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
