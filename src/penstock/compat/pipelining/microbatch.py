"""Chunk specs: torch's way to say along which dimension a value is cut and joined, as dims say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.compat.pipelining.errors import ArgumentTypeError
from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch, Microbatches, split_batch
from penstock.runtime.batch.outputs import merge


@dataclass(frozen=True, repr=False)
class TensorChunkSpec:
    """Split a tensor along a dimension.

    Args:
        split_dim: The dimension.
    """

    split_dim: int

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: Sequence[int]) -> Any:
        """Make one spec per positional argument; nested tuples are followed.

        Args:
            chunk_dims: The dimension of each argument.
        """
        return pytree.tree_map(TensorChunkSpec, tuple(chunk_dims))

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, int]) -> Any:
        """Make one spec per keyword argument.

        Args:
            chunk_dims: The dimension of each argument, by name.
        """
        return pytree.tree_map(TensorChunkSpec, dict(chunk_dims))


class _Replicate:
    """Every microbatch gets the value whole."""


@dataclass(frozen=True, eq=False)
class _CustomReducer:
    """Joins the outputs of microbatches by a function of (so far, next), from a first value."""

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


sum_reducer = _CustomReducer(torch.tensor(0.0, device="cpu"), torch.add)


def dims_of(spec: Any) -> Any:
    """Turn a spec, or a tree of them, into dimensions: None where nothing is cut. torch's own classes count too."""
    if spec is None or spec is _Replicate or type(spec).__name__ == "_Replicate":
        return None
    if hasattr(spec, "split_dim"):
        return int(spec.split_dim)
    if isinstance(spec, Mapping):
        return {key: dims_of(value) for key, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return tuple(dims_of(value) for value in spec)
    raise UsageError(
        f"{spec!r} is not a chunk spec; pass TensorChunkSpec(dimension), or None for a value that goes whole"
    )


def check_specs(args_chunk_spec: Any, kwargs_chunk_spec: Any) -> None:
    """Refuse what says nothing about positional, or about keyword, arguments."""
    if args_chunk_spec is not None and not isinstance(args_chunk_spec, (list, tuple)):
        raise UsageError(f"args_chunk_spec={args_chunk_spec!r}: pass a tuple, such as (TensorChunkSpec(0),)")
    if kwargs_chunk_spec is not None and not isinstance(kwargs_chunk_spec, Mapping):
        raise UsageError(
            f"kwargs_chunk_spec={kwargs_chunk_spec!r}: pass a dict, such as {{'mask': TensorChunkSpec(0)}}"
        )
    dims_of(args_chunk_spec)
    dims_of(kwargs_chunk_spec)


def batch_dims(
    args: Sequence[Any], kwargs: Mapping[str, Any], args_chunk_spec: Any, kwargs_chunk_spec: Any
) -> dict[str | int, Any]:
    """Return the specs of what this call passes; without a spec all is cut along dimension 0."""
    found: dict[str | int, Any] = {}
    if args and args_chunk_spec is not None:
        if len(args_chunk_spec) != len(args):
            raise UsageError(f"args_chunk_spec has {len(args_chunk_spec)} entries for {len(args)} positional arguments")
        found.update({place: dims_of(spec) for place, spec in enumerate(args_chunk_spec)})
    if kwargs and kwargs_chunk_spec is not None:
        if set(kwargs_chunk_spec) != set(kwargs):
            raise UsageError(
                f"kwargs_chunk_spec names {sorted(kwargs_chunk_spec)}, but the keyword arguments are {sorted(kwargs)}"
            )
        found.update({name: dims_of(spec) for name, spec in kwargs_chunk_spec.items()})
    return found


def one_each(
    chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, dims: Mapping[str | int, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Split values that have a row for each microbatch: torch cuts each value by its own rows.

    Whatever else does not fit is left as it is, for the pipeline to refuse.
    """

    def rows(label: str | int, value: Any) -> int | None:
        dim = dims.get(label, 0)
        fits = isinstance(value, Tensor) and isinstance(dim, int) and -value.dim() <= dim < value.dim()
        return value.shape[dim] if fits else None

    counts = [rows("target", target), *(rows(place, value) for place, value in enumerate(args))]
    batch = next((count for count in counts if count is not None), None)

    def parted(label: str | int, value: Any) -> Any:
        if batch in (None, chunks) or rows(label, value) != chunks:
            return value
        return Microbatches(value.tensor_split(chunks, dims.get(label, 0)))

    return (
        [parted(place, value) for place, value in enumerate(args)],
        {name: parted(name, value) for name, value in kwargs.items()},
    )


class NotPassed:
    """Stands, as a class, for an argument that a microbatch does not have though others have it."""


def as_arguments(
    chunks: int, arg_mbs: Sequence[Any] | None, kwarg_mbs: Sequence[Any] | None, target_mbs: Sequence[Any] | None
) -> tuple[list[Microbatches], dict[str, Microbatches], Microbatches | None]:
    """Turn a batch that is split already into a step's arguments; each microbatch has what it was given and no more."""
    for name, given, kind in (
        ("arg_mbs", arg_mbs, tuple),
        ("kwarg_mbs", kwarg_mbs, dict),
        ("target_mbs", target_mbs, object),
    ):
        if given is None:
            continue
        if not isinstance(given, list):
            raise ArgumentTypeError(f"{name} must be a list but got a {type(given).__name__}")
        if len(given) != chunks:
            raise UsageError(f"Expecting {chunks} {name} but got {len(given)}; pass one for each microbatch")
        for number, each in enumerate(given):
            if not isinstance(each, kind):
                raise ArgumentTypeError(
                    f"{name}[{number}] is a {type(each).__name__}; pass a {kind.__name__} of arguments"
                )
    args = [Microbatches(column) for column in zip_longest(*(arg_mbs or ()), fillvalue=NotPassed)]
    names = dict.fromkeys(name for each in kwarg_mbs or () for name in each)
    kwargs = {name: Microbatches(each.get(name, NotPassed) for each in kwarg_mbs or ()) for name in names}
    return args, kwargs, None if target_mbs is None else Microbatches(target_mbs)


def present(batch: Batch) -> Batch:
    """Leave out the arguments that single microbatches do not have."""
    batch.args = [tuple(value for value in args if value is not NotPassed) for args in batch.args]
    batch.kwargs = [{name: value for name, value in kw.items() if value is not NotPassed} for kw in batch.kwargs]
    return batch


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_chunk_spec: Any = None,
    kwargs_chunk_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split arguments into exactly `chunks` pieces each, the first ones a row longer where they do not divide.

    Here they may have different numbers of rows; a schedule's step takes only what fits together.
    """
    given = dict(kwargs or {})
    dims = batch_dims(args, given, args_chunk_spec, kwargs_chunk_spec)
    columns = [_pieces(value, chunks, dims.get(place, 0)) for place, value in enumerate(args)]
    named = {name: _pieces(value, chunks, dims.get(name, 0)) for name, value in given.items()}
    return (
        [tuple(column[number] for column in columns) for number in range(chunks)],
        [{name: column[number] for name, column in named.items()} for number in range(chunks)],
    )


def _pieces(value: Any, chunks: int, dim: Any) -> list[Any]:
    """Split an argument into microbatches. With one dimension for all of it, its tensors may differ in rows."""
    if not isinstance(dim, int):
        return [each[0] for each in split_batch(chunks, (value,), {}, None, {}, {0: dim}).args]
    leaves, structure = pytree.tree_flatten(value)
    columns = [split_batch(chunks, (leaf,), {}, None, {}, {0: dim}).args for leaf in leaves]
    return [pytree.tree_unflatten([column[number][0] for column in columns], structure) for number in range(chunks)]


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Join the outputs of microbatches: along a dimension, by a reducer, or as the one value in which all agree."""
    if not chunks:
        raise UsageError("there are no outputs to merge; pass one for each microbatch")
    if chunk_spec is None:
        return merge(chunks, 0)
    specs, structure = pytree.tree_flatten(chunk_spec, is_leaf=lambda spec: spec is None)
    columns: list[list[Any]] = [[] for _ in specs]
    for number, chunk in enumerate(chunks):
        leaves = pytree.tree_leaves(chunk, is_leaf=lambda leaf: leaf is None)
        if len(leaves) != len(specs):
            raise ModelError(
                f"the output of microbatch {number} has {len(leaves)} values, but output_merge_spec has {len(specs)}; "
                f"give one spec for each, or leave it out"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    joined = [_joined(spec, column) for spec, column in zip(specs, columns, strict=True)]
    return pytree.tree_unflatten(joined, structure)


def _joined(spec: Any, column: list[Any]) -> Any:
    if hasattr(spec, "reduce_fn"):
        total = spec.init_value
        for value in column:
            total = spec.reduce_fn(total, value)
        return total
    dim = dims_of(spec)
    if dim is not None:
        return torch.cat(column, dim)
    first = column[0]
    same = all(torch.equal(value, first) if isinstance(first, Tensor) else value == first for value in column)
    if not same:
        raise ModelError(
            "output_merge_spec says None for an output that differs between microbatches; name a dimension"
        )
    return first
