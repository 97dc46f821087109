"""A batch into microbatches.

Every tensor leaf is cut along its batch dimension into exactly as many pieces as there are
microbatches, the first ones a row longer where they do not divide (never fewer pieces, which
is what `chunk` gives for 9 rows in 4). All cut leaves must have the same number of rows: a
mask or a target that does not fit is an error and is never cut short. What is not a tensor, a
tensor without dimensions, and whatever is marked `Shared`, goes to every microbatch whole. An
object that hides tensors from the splitter is refused, since the rows in it would count many times.

A batch is data: its tensors are detached, and no gradient flows to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.rowed import cut_rowed, is_rowed, rows_of_rowed
from penstock.runtime.state.hidden_tensors import hides_tensors, is_array

Dims = Mapping[str | int, Any]


@dataclass(frozen=True)
class Shared:
    """Marks a value that every microbatch gets in full, at any depth: `pipe.step(x, table=Shared(table))`.

    Args:
        value: The value to pass.
    """

    value: Any


class Microbatches(list[Any]):
    """Marks an argument that you have split yourself: a list with one item per microbatch, of any sizes.

    ::

        pipe.step(Microbatches([x[:3], x[3:4], x[4:]]), target=Microbatches([y[:3], y[3:4], y[4:]]))

    Args:
        iterable: The items, in the order of the microbatches.
    """


@dataclass
class Batch:
    """What each microbatch is called with, by its number."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any]
    loss_kwargs: list[dict[str, Any]]
    rows: list[int] | None  # how many rows each has; None where nothing says so
    has_target: bool

    def row_counts(self) -> list[float]:
        """Return what microbatches weigh in a mean over rows; without a number of rows all count alike."""
        return [1.0] * len(self.args) if self.rows is None else [float(rows) for rows in self.rows]


def split_batch(
    count: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    loss_kwargs: Mapping[str, Any],
    dims: Dims,
    whole: bool = True,
    attached: bool = False,
    splitter: Splitter | None = None,
) -> Batch:
    """Cut everything into `count` microbatches; `dims` says along which dimension where it is not 0.

    Not `whole`: what one rank needs of a batch, which was checked where all of it is. `attached`: the pieces stay in
    the graph of what they are pieces of. `splitter`: one that cuts in a way of its own.
    """
    splitter = Splitter(count, dims, attached=attached) if splitter is None else splitter
    columns = [splitter.split(position, value) for position, value in enumerate(args)]
    named = {name: splitter.split(name, value) for name, value in kwargs.items()}
    arguments = splitter.rows_by_name()
    targets = splitter.split("target", target)
    if whole:
        _check_target(arguments, splitter.rows_by_name().get(_name("target")))
    extra = {name: splitter.split(name, value) for name, value in loss_kwargs.items()}
    return Batch(
        list(zip(*columns, strict=True)) if columns else [()] * count,
        _by_microbatch(named, count),
        targets,
        _by_microbatch(extra, count),
        splitter.rows(),
        target is not None,
    )


def check_is_data(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any]) -> None:
    """Refuse a tensor that waits for a gradient: a step would not deliver one to its batch."""
    for label, value in (*enumerate(args), ("the target", target), *kwargs.items(), *loss_kwargs.items()):
        for leaf in pytree.tree_leaves(list(value) if isinstance(value, Microbatches) else value):
            tensor = leaf.value if isinstance(leaf, Shared) else leaf
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                name = f"argument {label}" if isinstance(label, int) else label
                raise UsageError(
                    f"{name} of step() requires a gradient, but a step gives none to its batch; pass it detached, "
                    f"make the module that computes it a part of the model, or train with penstock.GPipe, whose "
                    f"inputs get gradients"
                )


def _by_microbatch(named: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    if not named:
        return [{} for _ in range(count)]
    return [dict(zip(named, pieces, strict=True)) for pieces in zip(*named.values(), strict=True)]


def count_for(most: int, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, dims: Dims) -> int | None:
    """Return into how many microbatches a batch of any size goes, or None where nothing says how many rows it has.

    A ready split says so itself; else there are `most`, or as many as there are rows.
    """
    splitter = Splitter(1, dims, strict=False)
    labelled: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items(), ("target", target)]
    for label, value in labelled:
        if isinstance(value, Microbatches):
            return len(value)
        splitter.split(label, value)
    return None if splitter.total is None else max(1, min(most, splitter.total))


def plain_example(example: Any) -> Any:
    """Return an example as the model takes it: what was marked for a batch without its marks."""

    def plain(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, Shared) else leaf[0] if isinstance(leaf, Microbatches) and leaf else leaf

    return pytree.tree_map(plain, example)


def check_labels(dims: Dims, passed: Collection[str | int], allowed: Collection[str | int]) -> None:
    """Refuse a label of `dims` that nothing has: it is a slip, and would leave what it meant cut along dimension 0."""
    strange = [label for label in dims if label not in allowed]
    if strange:
        raise UsageError(
            f"dims names {', '.join(map(repr, strange))}, which this call does not pass; it has "
            f"{', '.join(map(repr, passed))} (an argument that is passed by position goes by its number)"
        )


class Splitter:
    """Cuts values by rows, all into the same number of pieces, and keeps count of the rows."""

    def __init__(self, count: int, dims: Dims, strict: bool = True, attached: bool = False) -> None:
        self.count, self.dims, self.strict, self.attached = count, dims, strict, attached
        self.total: int | None = None
        self._said_by: str | int = ""
        # By microbatch, the rows of what came split already and has rows.
        self._ready_rows: dict[str, list[int]] = {}

    def split(self, label: str | int, value: Any) -> list[Any]:
        if isinstance(value, Microbatches):
            return self._ready(label, value)
        dim = self.dims.get(label, 0)
        if type(value) is Tensor and type(dim) is int and value.dim() > 0:
            return list(self._cut(label, value, dim))
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_rowed)
        wanted = dims_of_leaves(label, dim, value, len(leaves))
        columns = [
            self._cut(label, leaf, leaf_dim)
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf_dim is not None
            else self._cut_rowed(label, leaf)
            if leaf_dim is not None and is_rowed(leaf)
            else (self._uncut(label, leaf, leaf_dim is not None),) * self.count
            for leaf, leaf_dim in zip(leaves, wanted, strict=True)
        ]
        return [pytree.tree_unflatten([column[number] for column in columns], spec) for number in range(self.count)]

    def _cut(self, label: str | int, value: Tensor, dim: int) -> Sequence[Tensor]:
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested tensor" if value.is_nested else f"tensor with layout {value.layout}"
            raise ModelError(
                f"{_name(label)} is or holds a {kind}, which cannot be cut into rows; pass a dense tensor, or split it "
                f"yourself: penstock.Microbatches([one {kind} for each microbatch])"
            )
        if not -value.dim() <= dim < value.dim():
            raise UsageError(f"dims[{label!r}] is {dim}, but the tensor has shape {tuple(value.shape)}")
        self._note(label, value.shape[dim], f" along dimension {dim}", f" (its shape is {tuple(value.shape)})")
        return self.pieces(label, value, dim)

    def _note(self, label: str | int, rows: int, where: str = "", shape: str = "") -> None:
        """Note the rows of what is cut, and check that all of it has the same."""
        if self.total is None:
            self.total, self._said_by = rows, label
            if rows == 0:
                raise ModelError(f"{_name(label)} has 0 rows{shape}: an empty batch has nothing to compute; skip it")
            if rows < self.count and self.strict:
                raise ModelError(
                    f"{_name(label)} has {rows} rows, fewer than the {self.count} microbatches; "
                    f"pass a larger batch or at most microbatches={rows}"
                )
        elif rows != self.total and self.strict:
            raise ModelError(
                f"{_name(label)} has {rows} rows{where}, but {_name(self._said_by)} has {self.total}; wrap it in "
                f"penstock.Shared(...) if every microbatch needs it whole, say where its rows are with "
                f"BatchOptions(dims={{{label!r}: ...}}), or, if these are no rows of the batch (pixels of its images), "
                f"split it yourself: penstock.Microbatches([one part for each microbatch])"
            )

    def pieces(self, label: str | int, value: Tensor, dim: int) -> Sequence[Tensor]:
        """Return one piece for each microbatch."""
        rows = value.shape[dim]
        if self.attached and value.requires_grad:
            size, larger = divmod(rows, self.count)
            sizes = [size + 1] * larger + [size] * (self.count - larger)
            return torch.split_with_sizes(value, sizes, dim)  # one node of the graph, not one per piece
        return value.detach().tensor_split(self.count, dim)

    def indices(self, rows: int) -> Sequence[Tensor]:
        """Return the numbers of each microbatch's rows."""
        return torch.arange(rows, device="cpu").tensor_split(self.count)

    def _cut_rowed(self, label: str | int, value: Any) -> Sequence[Any]:
        rows = rows_of_rowed(value)
        if rows is None:
            return (value,) * self.count
        self._note(label, rows)
        return cut_rowed(value, self.indices(rows))

    def _ready(self, label: str | int, value: Microbatches) -> list[Any]:
        if len(value) != self.count:
            raise ModelError(f"{_name(label)} has {len(value)} microbatches, the pipeline {self.count}")
        dim = self.dims.get(label, 0)
        found = [_rows_of(item, dim) for item in value]
        rows = [each for each in found if each is not None]
        if len(rows) == len(found):
            self._ready_rows[_name(label)] = rows
        return [pytree.tree_map(lambda leaf: self._uncut(label, leaf, False), item) for item in value]

    def _uncut(self, label: str | int, leaf: Any, searched: bool) -> Any:
        found = _uncut(label, leaf, searched)
        return found if self.attached else _apart(found)

    def cut_rows(self) -> list[int] | None:
        """Return how many rows of the tensors that are cut here each microbatch gets."""
        if self.total is None:
            return None
        size, larger = divmod(self.total, self.count)
        return [size + 1] * larger + [size] * (self.count - larger)

    def rows_by_name(self) -> dict[str, list[int]]:
        """Return the rows of all that has some, by microbatch; first of what is cut here."""
        cut = self.cut_rows()
        return dict(self._ready_rows) if cut is None else {_name(self._said_by): cut, **self._ready_rows}

    def rows(self) -> list[int] | None:
        """Return the rows by which the batch's mean goes: of what is cut here, else of the target, else of the first
        that has any.
        """
        known = self.rows_by_name()
        return self.cut_rows() or known.get(_name("target")) or next(iter(known.values()), None)


def _check_target(arguments: Mapping[str, list[int]], target: list[int] | None) -> None:
    """Check that the target has the rows of an argument; not of each: dimension 0 of a bias is not of rows."""
    if target is not None and 0 in target:
        raise ModelError(
            f"'target' has {target} rows in its microbatches: the mean loss of one without rows is not defined; give "
            f"each at least one row"
        )
    if target is None or not arguments or target in arguments.values():
        return
    name, rows = next(iter(arguments.items()))
    raise ModelError(
        f"'target' has {target} rows in its microbatches, but {name} has {rows}; split both alike, or say with "
        f"BatchOptions(dims={{'target': None}}) that the target's dimension 0 is not that of rows"
    )


def _rows_of(item: Any, dim: Any) -> int | None:
    """Return the rows of one microbatch that came ready: what all its tensors have along their batch dimension."""
    leaves = pytree.tree_leaves(item, is_leaf=is_rowed)
    try:
        dims = dims_of_leaves("", dim, item, len(leaves))
    except UsageError:
        return None
    pairs = [(leaf, at) for leaf, at in zip(leaves, dims, strict=True) if isinstance(leaf, Tensor) and at is not None]
    found = {leaf.shape[at] for leaf, at in pairs if -leaf.dim() <= at < leaf.dim()}
    found |= {rows for leaf in leaves if is_rowed(leaf) and (rows := rows_of_rowed(leaf)) is not None}
    return found.pop() if len(found) == 1 else None


def _uncut(label: str | int, leaf: Any, searched: bool) -> Any:
    """Return a leaf that goes whole to where it goes; `searched` for tensors that it must not hide."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, Shared):
        return leaf.value
    if isinstance(leaf, Microbatches):
        raise UsageError(
            f"{_name(label)} has penstock.Microbatches inside a container; it marks a whole argument: "
            f"pass Microbatches([one container for each microbatch])"
        )
    if searched and is_array(leaf):
        raise ModelError(
            f"{_name(label)} is or holds a numpy array of shape {leaf.shape}, whose rows are not cut; pass "
            f"torch.from_numpy(...) of it, or penstock.Shared(...) if every microbatch needs it whole"
        )
    if searched and hides_tensors(leaf):
        kind = type(leaf).__qualname__
        raise ModelError(
            f"{_name(label)} is or holds a {kind}, which has tensors that Penstock cannot see to cut; register {kind} "
            f"with torch.utils._pytree.register_pytree_node or register_dataclass, pass a dict or tuple, split it "
            f"yourself in penstock.Microbatches([...]), or pass it whole to every microbatch in penstock.Shared(...)"
        )
    return leaf


def _apart(value: Any) -> Any:
    """Return a value without the graph behind it."""
    return pytree.tree_map_only(Tensor, lambda each: each.detach() if each.requires_grad else each, value)


def dims_of_leaves(label: str | int, dim: Any, value: Any, leaves: int) -> list[int | None]:
    """Read what `dims` states about one value, leaf by leaf; None: the leaf is not cut.

    One number, or None, holds for all leaves below the place where it stands; keys are found by name.
    """
    if dim is None or isinstance(dim, int):
        return [dim] * leaves
    found: list[int | None] = []
    for path, _ in pytree.tree_flatten_with_path(value, is_leaf=is_rowed)[0]:
        here = dim
        try:
            for key in path:
                here = here if here is None or isinstance(here, int) else key.get(here)
        except (AttributeError, LookupError, TypeError):
            here = dim
        if not (here is None or isinstance(here, int)):
            raise UsageError(
                f"dims[{label!r}] says nothing about {pytree.keystr(path) or 'the value'}; "
                f"pass a single number or None, or one per leaf"
            )
        found.append(here)
    return found


def _name(label: str | int) -> str:
    return f"argument {label}" if isinstance(label, int) else f"{label!r}"
