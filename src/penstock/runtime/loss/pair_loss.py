"""What the check of a loss does with two microbatches: joins their rows, and calls the loss without leaving a trace."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.random_states import random_state, restore_random
from penstock.model.replay.recording.undo import undone


class CannotJoinError(Exception):
    """Two microbatches that cannot be joined."""


def same_memory(one: Any, two: Any, dim: int) -> bool:
    """What all microbatches share; pieces of an expanded row are at one place, too."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.shape != two.shape or not one.numel():
        return False
    return one.data_ptr() == two.data_ptr() and one.stride(dim) != 0


def blocks_per_row(leaf: Tensor, dim: int, rows: int) -> int:
    """How many entries along its dimension of rows a leaf has for each row; 0 where it has none."""
    whole, left = divmod(leaf.shape[dim], rows)
    return 0 if left else whole


def first_rows(leaf: Any, other: Any, dim: int | None, rows: int, few: int) -> Any:
    if not isinstance(leaf, Tensor) or dim is None or not leaf.dim() or same_memory(leaf, other, dim):
        return leaf
    return leaf.narrow(dim, 0, blocks_per_row(leaf, dim, rows) * few) if blocks_per_row(leaf, dim, rows) else leaf


def join_leaf(one: Any, two: Any, dim: int | None, rows: tuple[int, int]) -> Any:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        if one is two or (type(one) is type(two) and isinstance(one, (int, float, str)) and one == two):
            return one
        raise CannotJoinError
    if one.is_nested or two.is_nested or one.layout is not torch.strided:
        raise CannotJoinError
    blocks = [0, 0]
    if dim is not None and one.dim() and one.dim() == two.dim() and not same_memory(one, two, dim):
        blocks = [blocks_per_row(leaf, dim, count) for leaf, count in zip((one, two), rows, strict=True)]
    if blocks != [1, 1] and type(one) is type(two) is Tensor and one.shape == two.shape and torch.equal(one, two):
        return one  # (to compare spread tensors, all ranks would have to)
    if blocks[0] != blocks[1] or not blocks[0] or one.narrow(dim or 0, 0, 0).shape != two.narrow(dim or 0, 0, 0).shape:
        raise CannotJoinError
    return torch.cat([one, two], dim or 0)


@contextmanager
def untouched(loss_fn: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Around a call of the loss that nobody shall see: its state and random numbers are put back.

    Yields a question: whether it has drawn any.
    """
    numpy = sys.modules.get("numpy")

    def elsewhere() -> Any:
        return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)

    before, others = random_state(), elsewhere()
    drawn = False
    with ExitStack() as stack:
        for module in _called_modules(loss_fn):
            stack.enter_context(undone(module))
        try:
            yield lambda: drawn
        finally:
            now = random_state()
            if not all(map(torch.equal, (before[0], *before[1]), (now[0], *now[1]))):
                drawn = True
                restore_random(before)
            if repr(elsewhere()) != repr(others):
                drawn = True
                random.setstate(others[0])
                if numpy is not None:
                    numpy.random.set_state(others[1])


def _called_modules(loss_fn: Any) -> list[nn.Module]:
    """The modules that a call runs: the loss or its owner, and not what its code names (`transaction.modules_of`)."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    owner = getattr(loss_fn, "__self__", None)
    return [each for each in (loss_fn, owner) if isinstance(each, nn.Module)]
