"""A batch into microbatches, and outputs back into one.

Every tensor leaf is cut along its batch dimension into exactly as many pieces as there are
microbatches, the first ones a row longer where they do not divide (never fewer pieces, which
is what `chunk` gives for 9 rows in 4). All cut leaves must have the same number of rows: a
mask or a target that does not fit is an error and is never cut short. What is not a tensor, a
tensor without dimensions, and whatever is marked `Shared`, goes to every microbatch whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError

__all__ = ["Batch", "Microbatches", "Shared", "count_for", "merge", "split_batch"]

Dims = Mapping[str | int, Any]


@dataclass(frozen=True)
class Shared:
    """Marks an argument that every microbatch gets whole: `pipe.step(x, table=Shared(table))`."""

    value: Any


class Microbatches(list[Any]):
    """Marks an argument that the user has split: one item for each microbatch, of any sizes."""


@dataclass
class Batch:
    """What each microbatch is called with, by its number."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_kwargs: list[dict[str, Any]]
    rows: list[int] | None  # how many rows each has; None where nothing says so
    has_target: bool


def split_batch(
    count: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    loss_kwargs: Mapping[str, Any],
    dims: Dims,
) -> Batch:
    """Cut everything into `count` microbatches; `dims` says along which dimension where it is not 0."""
    splitter = _Splitter(count, dims)
    columns = [splitter.split(position, value) for position, value in enumerate(args)]
    named = {name: splitter.split(name, value) for name, value in kwargs.items()}
    targets = splitter.split("target", target)
    extra = {name: splitter.split(name, value) for name, value in loss_kwargs.items()}
    return Batch(
        list(zip(*columns, strict=True)) if columns else [()] * count,
        _by_microbatch(named, count),
        targets,
        _by_microbatch(extra, count),
        splitter.rows(),
        target is not None,
    )


def _by_microbatch(named: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    if not named:
        return [{} for _ in range(count)]
    return [dict(zip(named, pieces, strict=True)) for pieces in zip(*named.values(), strict=True)]


def count_for(most: int, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, dims: Dims) -> int | None:
    """Into how many microbatches a batch of any size goes, or None where nothing says how many rows it has.

    A ready split says so itself; else there are `most`, or as many as there are rows.
    """
    splitter = _Splitter(1, dims, strict=False)
    labelled: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items(), ("target", target)]
    for label, value in labelled:
        if isinstance(value, Microbatches):
            return len(value)
        splitter.split(label, value)
    return None if splitter.total is None else max(1, min(most, splitter.total))


class _Splitter:
    def __init__(self, count: int, dims: Dims, strict: bool = True) -> None:
        self.count, self.dims, self.strict = count, dims, strict
        self.total: int | None = None
        self._said_by = ""
        self._ready_rows: list[int] | None = None

    def split(self, label: str | int, value: Any) -> list[Any]:
        if isinstance(value, Shared):
            return [value.value] * self.count
        if isinstance(value, Microbatches):
            return self._ready(label, value)
        dim = self.dims.get(label, 0)
        if type(value) is Tensor and type(dim) is int and value.dim() > 0:
            return list(self._cut(label, value, dim))
        leaves, spec = pytree.tree_flatten(value)
        wanted = _dims_of_leaves(label, dim, value, len(leaves))
        columns = [
            self._cut(label, leaf, leaf_dim)
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf_dim is not None
            else (leaf,) * self.count
            for leaf, leaf_dim in zip(leaves, wanted, strict=True)
        ]
        return [
            pytree.tree_unflatten([column[number] for column in columns], spec) for number in range(self.count)
        ]

    def _cut(self, label: str | int, value: Tensor, dim: int) -> Sequence[Tensor]:
        if not -value.dim() <= dim < value.dim():
            raise UsageError(f"batch_dims[{label!r}] is {dim}, but the tensor has shape {tuple(value.shape)}")
        rows = value.shape[dim]
        if self.total is None:
            self.total, self._said_by = rows, _name(label)
            if rows < self.count and self.strict:
                raise ModelError(
                    f"{_name(label)} has {rows} rows, fewer than the {self.count} microbatches; "
                    f"pass a larger batch or at most microbatches={max(rows, 1)}"
                )
        elif rows != self.total and self.strict:
            raise ModelError(
                f"{_name(label)} has {rows} rows along dimension {dim}, but {self._said_by} has {self.total}; "
                f"wrap it in penstock.Shared(...) if every microbatch needs it whole, or say where its rows "
                f"are with batch_dims={{{label!r}: ...}}"
            )
        return value.detach().tensor_split(self.count, dim)

    def _ready(self, label: str | int, value: Microbatches) -> list[Any]:
        if len(value) != self.count:
            raise ModelError(f"{_name(label)} has {len(value)} microbatches, the pipeline {self.count}")
        if self._ready_rows is None:
            dim = self.dims.get(label, 0)
            self._ready_rows = [_first_rows(item, dim if isinstance(dim, int) else 0) for item in value]
        return list(value)

    def rows(self) -> list[int] | None:
        if self._ready_rows is not None:
            return self._ready_rows
        if self.total is None:
            return None
        size, larger = divmod(self.total, self.count)
        return [size + 1] * larger + [size] * (self.count - larger)


def _first_rows(item: Any, dim: int) -> int:
    for leaf in pytree.tree_leaves(item):
        if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
            return leaf.shape[dim]
    return 1


def _dims_of_leaves(label: str | int, dim: Any, value: Any, leaves: int) -> list[int | None]:
    """What `batch_dims` says about one value, leaf by leaf; None: the leaf is not cut.

    One number, or None, holds for all leaves below the place where it stands; keys are found by name.
    """
    if dim is None or isinstance(dim, int):
        return [dim] * leaves
    found: list[int | None] = []
    for path, _ in pytree.tree_flatten_with_path(value)[0]:
        here = dim
        try:
            for key in path:
                here = here if here is None or isinstance(here, int) else key.get(here)
        except (AttributeError, LookupError, TypeError):
            here = dim
        if not (here is None or isinstance(here, int)):
            raise UsageError(
                f"batch_dims[{label!r}] says nothing about {pytree.keystr(path) or 'the value'}; "
                f"give one number or None in all, or one for each leaf"
            )
        found.append(here)
    return found


def _name(label: str | int) -> str:
    return f"argument {label}" if isinstance(label, int) else f"{label!r}"


def merge(outputs: Sequence[Any], dim: Any = 0) -> Any:
    """Outputs of all microbatches as one: tensors joined along `dim` (one number, or one for each leaf), scalars
    stacked. A leaf that has no rows (None), or is no tensor, is itself where all agree, else the list of all."""
    leaves, specs = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise ModelError("microbatches gave outputs of different structure; they cannot be merged into one")
    dims = _dims_of_leaves("output", dim, outputs[0], len(leaves[0]))
    joined = [_join(column, at) for column, at in zip(zip(*leaves, strict=True), dims, strict=True)]
    return pytree.tree_unflatten(joined, specs[0])


def _join(column: Sequence[Any], dim: int | None) -> Any:
    first = column[0]
    if isinstance(first, Tensor) and dim is not None:
        return torch.stack(tuple(column)) if first.dim() == 0 else torch.cat(tuple(column), dim)
    same = torch.equal if isinstance(first, Tensor) else operator.eq
    return first if all(same(value, first) for value in column) else list(column)
