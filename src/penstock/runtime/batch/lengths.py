"""Microbatches by token count: rows of like length together, without the padding that they do not need.

A batch of sequences is padded to its longest. Cut by rows, every microbatch would compute on as much padding. So rows
are sorted by length, neighbours share a microbatch, and each microbatch is as wide as its own longest row: what it
costs is its rows times that width. Microbatches are made as alike in that as they can be, since a pipeline goes at the
pace of the heaviest. The plan depends on lengths alone, so all ranks follow the same one, and outputs return in the
order in which the rows came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.rules import is_count
from penstock.runtime.batch.microbatch import Dims, Splitter
from penstock.runtime.batch.outputs import merge
from penstock.runtime.messages import plain

Label = str | int


@dataclass(frozen=True)
class LengthPlan:
    """Which rows go into which microbatch, and how wide each of these is."""

    rows: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many microbatches there are."""
        return len(self.rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What each microbatch costs, padding included."""
        return tuple(len(rows) * width for rows, width in zip(self.rows, self.widths, strict=True))

    @cached_property
    def index(self) -> tuple[Tensor, ...]:
        """The rows of each microbatch, to select them by."""
        return tuple(torch.tensor(rows, device="cpu") for rows in self.rows)

    @cached_property
    def inverse(self) -> Tensor:
        """Where each row of the batch stands once all microbatches are joined."""
        return torch.cat(self.index).argsort()


plain.register(LengthPlan, rows=tuple, widths=tuple)


class ByTokens:
    """What `by_tokens` says; made into a plan for each batch."""

    def __init__(self, max_tokens: int | None, lengths: Any, sequences: Any) -> None:
        if max_tokens is not None and (not is_count(max_tokens) or max_tokens < 1):
            raise UsageError(f"max_tokens={max_tokens!r}: pass a whole number above 0, or leave it out")
        if not (isinstance(lengths, (str, int)) or callable(lengths)) or isinstance(lengths, bool):
            raise UsageError(
                f"lengths={lengths!r}: name the argument that has the lengths or the mask, or pass a function of the "
                f"batch's arguments that returns them"
            )
        self.max_tokens = max_tokens
        self.lengths = lengths
        self.sequences = _sequences(sequences)

    def __repr__(self) -> str:
        lengths = self.lengths if isinstance(self.lengths, (str, int)) else "a function"
        return f"by_tokens({self.max_tokens}, lengths={lengths!r}, sequences={self.sequences})"

    def check_labels(self, args: Sequence[Any], names: Sequence[str], takes: Sequence[Collection[str] | None]) -> None:
        """Refuse a sequence that nothing is called by: it is a slip, and would stay as wide as it is."""
        if any(each is None for each in takes):
            return
        known = {*range(len(args)), *names, "target", "output", *(name for each in takes for name in each or ())}
        strange = [label for label in self.sequences if label not in known]
        if strange:
            raise UsageError(
                f"by_tokens' sequences name {', '.join(map(repr, strange))}, which this call does not pass; it has "
                f"{', '.join(map(repr, [*range(len(args)), *names, 'target', 'output']))}"
            )

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], least: int, fixed: bool) -> LengthPlan | None:
        """Plan a batch with at least so many microbatches, or just as many; None where no batch is given."""
        if not args and not kwargs:
            return None
        lengths = _read(self.lengths, args, kwargs)
        widest = max(lengths)
        if self.max_tokens is not None and widest > self.max_tokens:
            raise ModelError(
                f"row {lengths.index(widest)} has {widest} tokens, more than max_tokens={self.max_tokens}; shorten "
                f"it, or allow as many"
            )
        costs = [max(1, length) for length in lengths]
        order = sorted(range(len(costs)), key=costs.__getitem__)
        count = min(least, len(costs)) if not fixed else least
        if len(costs) < count:
            raise ModelError(
                f"the batch has {len(costs)} rows, fewer than the {count} microbatches; pass a larger batch or at most "
                f"microbatches={len(costs)}"
            )
        ranked = [costs[row] for row in order]
        if self.max_tokens is not None:
            count = max(count, len(_greedy(ranked, self.max_tokens)))
        bins = _balanced(ranked, count)
        return LengthPlan(
            tuple(tuple(sorted(order[first:end])) for first, end in bins), tuple(ranked[end - 1] for _, end in bins)
        )


def by_tokens(
    max_tokens: int | None = None, *, lengths: Label | Callable[..., Any] = "lengths", sequences: Any = (0,)
) -> ByTokens:
    """Split batches by length: `Pipeline(..., batch_options=BatchOptions(split=by_tokens(4096)))`.

    Args:
        max_tokens: The most tokens per microbatch: its rows times its longest row. Batches get as many microbatches as
            that takes, and at least `microbatches=`. Without it, there are exactly `microbatches=`.
        lengths: The argument that holds each row's length (one number per row) or a mask (one per token), by name or
            position; or a function of the batch's arguments.
        sequences: The padded arguments, which may be cut to a microbatch's width: names or positions, `"target"` and
            `"output"` included, with their dimension where it is not 1: `{"ids": 1, "target": 1}`.
    """
    return ByTokens(max_tokens, lengths, sequences)


def _sequences(given: Any) -> dict[Label, int]:
    found = dict(given) if isinstance(given, Mapping) else None
    if found is None and isinstance(given, (list, tuple, set, frozenset)):
        found = dict.fromkeys(given, 1)
    if found is None or not all(isinstance(label, (str, int)) and is_count(dim) for label, dim in found.items()):
        raise UsageError(
            f"sequences={given!r}: pass the names or positions of what is padded, such as (0, 'target'), or a dict of "
            f"these to the padded dimension"
        )
    return found


def _read(label: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """Read each row's length, from lengths, from a mask, or from what a function makes of the batch."""
    if callable(label):
        said, value = "lengths=function", label(*args, **kwargs)
    elif isinstance(label, int):
        said, value = f"argument {label}", args[label] if -len(args) <= label < len(args) else None
    else:
        said, value = repr(label), kwargs.get(label)
    if value is None:
        passed = ", ".join(map(repr, [*range(len(args)), *kwargs]))
        raise UsageError(f"by_tokens reads {said}, which this call does not pass; it has {passed}")
    if isinstance(value, PackedSequence):
        value = pad_packed_sequence(value)[1]
    if not isinstance(value, Tensor):
        raise ModelError(f"{said} is a {type(value).__name__}; pass a tensor, which is cut with the batch")
    found = value.detach().cpu()
    if found.dim() == 2:
        valid = found != 0
        places = torch.arange(1, found.shape[1] + 1, device="cpu")
        found = (
            torch.where(valid, places, 0).amax(1)
            if found.shape[1]
            else torch.zeros(len(found), dtype=torch.int64, device="cpu")
        )
    if found.dim() != 1 or found.is_floating_point() or found.dtype is torch.bool or not len(found):
        raise ModelError(
            f"{said} has shape {tuple(found.shape)} and dtype {found.dtype}; by_tokens takes one whole number per row, "
            f"or a mask with one entry per token"
        )
    lengths: list[int] = found.tolist()
    if min(lengths) < 0:
        raise ModelError(f"{said} says that row {lengths.index(min(lengths))} has {min(lengths)} tokens")
    return lengths


def _greedy(ranked: Sequence[int], cap: int) -> list[tuple[int, int]]:
    """Choose ranges of rows, from the longest down, each with as many as the cap allows: the fewest there can be."""
    bins = []
    end = len(ranked)
    while end:
        first = max(0, end - max(1, cap // ranked[end - 1]))
        bins.append((first, end))
        end = first
    return bins[::-1]


def _balanced(ranked: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Choose exactly so many ranges, the heaviest as light as can be."""
    low, high = max(ranked), len(ranked) * max(ranked)
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(ranked, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    bins = _greedy(ranked, low)
    while len(bins) < count:
        first, end = max(
            (each for each in bins if each[1] - each[0] > 1), key=lambda each: (each[1] - each[0]) * ranked[each[1] - 1]
        )
        place, half = bins.index((first, end)), (first + end) // 2
        bins[place : place + 1] = [(first, half), (half, end)]
    return bins


class PlanSplitter(Splitter):
    """Cuts as a plan says."""

    def __init__(self, plan: LengthPlan, sequences: Mapping[Label, int], dims: Dims) -> None:
        super().__init__(plan.count, dims)
        self._plan = plan
        self._sequences = sequences
        self._nested = False  # what is cut now lies in a container
        self._padded: tuple[Label, int] | None = None  # the first sequence, and how wide it is with its padding

    def split(self, label: Label, value: Any) -> list[Any]:
        self._nested = not isinstance(value, Tensor)
        return super().split(label, value)

    def pieces(self, label: Label, value: Tensor, dim: int) -> Sequence[Tensor]:
        rows = sum(map(len, self._plan.rows))
        if value.shape[dim] != rows:
            raise ModelError(
                f"{label!r} has {value.shape[dim]} rows along dimension {dim}, but there are {rows} lengths"
            )
        found = [value.detach().index_select(dim, index.to(value.device)) for index in self._plan.index]
        if label not in self._sequences:
            return found
        along, widest = self._sequences[label], max(self._plan.widths)
        if self._nested and not -value.dim() <= along < value.dim():
            return found  # say, lengths beside the ids in a dict
        if not -value.dim() <= along < value.dim() or along % value.dim() == dim % value.dim():
            raise UsageError(
                f"sequences says that {label!r} is padded along dimension {along}, but it has shape "
                f"{tuple(value.shape)} with rows along dimension {dim}"
            )
        if value.shape[along] < widest:
            raise ModelError(
                f"{label!r} has {value.shape[along]} tokens along dimension {along}, but the longest row has {widest}"
            )
        self._padded = self._padded or (label, value.shape[along])
        if value.shape[along] != self._padded[1]:
            raise ModelError(
                f"{label!r} has {value.shape[along]} entries along dimension {along}, but {self._padded[0]!r} is "
                f"padded to {self._padded[1]}; name only what is padded alike in by_tokens' sequences"
            )
        return [
            piece.narrow(along, 0, width).contiguous() for piece, width in zip(found, self._plan.widths, strict=True)
        ]

    def indices(self, rows: int) -> Sequence[Tensor]:
        if rows != sum(map(len, self._plan.rows)):
            raise ModelError(f"there are {rows} rows, but {sum(map(len, self._plan.rows))} lengths")
        return self._plan.index

    def cut_rows(self) -> list[int] | None:
        return None if self.total is None else [len(rows) for rows in self._plan.rows]


NAME_IT = (
    "name the output among by_tokens' sequences, such as sequences=(0, 'output'), to have it padded, or return "
    "something without that dimension"
)


def merge_by_plan(outputs: Sequence[Any], dim: Any, plan: LengthPlan, along: int | None) -> Any:
    """Join outputs of all microbatches in the order of the batch's rows; padded with zeros along `along`."""
    if along is not None:
        outputs = [
            pytree.tree_map_only(Tensor, lambda each: _widened(each, along, max(plan.widths)), o) for o in outputs
        ]
    joined = merge(outputs, dim, NAME_IT)
    rows = len(plan.inverse)

    def in_order(value: Tensor) -> Tensor:
        at = dim if isinstance(dim, int) else 0
        if dim is None or not -value.dim() <= at < value.dim() or value.shape[at] != rows:
            return value
        return value.index_select(at, plan.inverse.to(value.device))

    return pytree.tree_map_only(Tensor, in_order, joined)


def _widened(value: Tensor, along: int, width: int) -> Tensor:
    if not -value.dim() <= along < value.dim() or value.shape[along] >= width:
        return value
    shape = list(value.shape)
    shape[along] = width - value.shape[along]
    return torch.cat([value, value.new_zeros(shape)], along)
