"""What leaves a stage, and what it is handed: the two places where memory or a graph could be shared unseen.

Leaving: an object that is no container to torch crosses as it is, and the tensors inside it lose
their gradients (or, between threads, keep the sender's graph), so it is refused. A tensor in the
memory of one of the stage's buffers would change under way when the stage counts on, so it is copied.

Handed: a stage may write into its input, as `nn.ReLU(inplace=True)` does where it comes first. Torch
forbids that for a leaf that wants a gradient, also through a view; and the memory may be that of the
sender or of a second reader. A copy makes it right, but most stages do not write, and for them it
would be memory held until the backward. So a stage is handed copies in its first forward (one for
training, one for inference), which shows by their versions whether it writes: if it does, it gets copies
ever after; if not, the values themselves, and a write that comes later is an error, not a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.runtime.buffers import version_of

__all__ = ["Outgoing", "Received", "afresh", "check_unwritten", "versions"]

_PLAIN = (int, float, complex, bool, str, bytes, Enum, type, PurePath, torch.dtype, torch.device, torch.Size)
_DENSE = (Tensor, nn.Parameter)
DEPTH = 4  # of objects in objects that are searched for tensors


class Outgoing:
    """What one stage emits, made fit to leave."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._owned: frozenset[int] | None = None  # where its buffers and parameters are

    def fit(self, value: Any) -> Any:
        """The same value, with copies of what is the stage's own."""
        kind = type(value)
        if kind is Tensor:
            return self._own(value)
        if (kind is tuple or kind is list) and all(leaf is None or type(leaf) is Tensor for leaf in value):
            return kind([leaf if leaf is None else self._own(leaf) for leaf in value])
        leaves, spec = pytree.tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and leaf is not None and _holds_tensors(leaf):
                name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
                raise ModelError(
                    f"stage {self._stage} returns a {name} that holds tensors, which torch does not know as a "
                    f"container: their gradients would be lost on the way; register it with "
                    f"torch.utils._pytree.register_dataclass or register_pytree_node, or return a dict or a tuple"
                )
        return pytree.tree_unflatten([self._own(leaf) if type(leaf) in _DENSE else leaf for leaf in leaves], spec)

    def _own(self, leaf: Tensor) -> Tensor:
        if leaf.requires_grad or leaf.layout is not torch.strided:
            return leaf
        if self._owned is None:
            tensors = (*self._module.buffers(), *self._module.parameters())
            self._owned = frozenset(_address(tensor) for tensor in tensors) - {0}
        return leaf.detach().clone() if _address(leaf) in self._owned else leaf


def _address(tensor: Tensor) -> int:
    if type(tensor) not in _DENSE or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _holds_tensors(value: Any, depth: int = DEPTH) -> bool:
    """Whether there is a tensor among the attributes or the entries of an object."""
    if isinstance(value, Tensor):
        return True
    if value is None or isinstance(value, _PLAIN) or depth == 0:
        return False
    inside: list[Any] = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        inside += [getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    return any(_holds_tensors(each, depth - 1) for each in inside)


class Received:
    """What one stage is handed, and whether it writes into it."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._writes: dict[bool, bool] = {}  # by whether gradients are on

    def hand(self, arrived: Mapping[int, Any]) -> tuple[Mapping[int, Any], list[tuple[Tensor, int]] | None]:
        """What the stage works on, and what to look at when it has (None: nothing)."""
        writes = self._writes.get(torch.is_grad_enabled())
        if writes is False:
            for payload in arrived.values():
                if type(payload) is not Tensor or not payload.requires_grad:
                    return arrived, [pair for each in arrived.values() for pair in versions(each, plain=True)]
            return arrived, None  # torch itself guards leaves that want a gradient
        arrived = {stage: pytree.tree_map_only(Tensor, _copy, payload) for stage, payload in arrived.items()}
        return arrived, None if writes else [pair for payload in arrived.values() for pair in versions(payload)]

    def learn(self, watched: Iterable[tuple[Tensor, int]]) -> None:
        """After the run."""
        mode = torch.is_grad_enabled()
        moved = any(version_of(tensor) != version for tensor, version in watched)
        if mode not in self._writes:
            self._writes[mode] = moved
        elif moved:
            raise ModelError(self.late())

    def late(self) -> str:
        """The stage writes, and did not the first time."""
        return (
            f"stage {self._stage} wrote in place into a value that it received, which its first forward did not: the "
            f"value may be in use elsewhere; clone() it in the stage's forward before it is written to"
        )


def versions(value: Any, *, plain: bool = False) -> list[tuple[Tensor, int]]:
    """The tensors of a value and their versions; `plain`: only those that want no gradient."""
    if type(value) is Tensor:
        return [] if plain and value.requires_grad else [(value, version_of(value))]
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(leaf, version_of(leaf)) for leaf in leaves if not (plain and leaf.requires_grad)]


def check_unwritten(stage: int, watched: Iterable[tuple[Tensor, int]]) -> None:
    """The model's own inputs, of a stage that will run again on them."""
    if any(version_of(tensor) != version for tensor, version in watched):
        raise ModelError(
            f"stage {stage} writes in place into the model's input, so that its forward cannot run a second time "
            f"on it; clone() the input before it is written to, or use recompute='never'"
        )


def afresh(value: Any) -> Any:
    """The same tensors in containers of their own."""
    return value if type(value) is Tensor else pytree.tree_map(lambda leaf: leaf, value)


def _copy(tensor: Tensor) -> Tensor:
    """In the same strides, as far as memory does not overlap: kernels may round by them."""
    copied = tensor.clone()
    if copied.layout is not torch.strided or type(tensor) not in _DENSE or copied.stride() == tensor.stride():
        return copied
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return copied
    strided: Tensor = _CopyStrided.apply(tensor)  # type: ignore[no-untyped-call]
    return strided


class _CopyStrided(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient
