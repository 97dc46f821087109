"""Which unit call's output a tensor depends on: marks, followed through every operation of the glue.

Every tensor that a unit call returns is marked with (call, leaf). The marks travel through the glue's operations, seen
below autograd where nothing escapes. They hang on storages: a write through a view reaches all that share it, so
in-place glue can only add marks, never lose one. What turns a tensor into Python values (`item`, `tolist`, `numpy`) may
decide anything that comes after: from there on everything depends on it.

Where a recorded plan may not hold for another microbatch, the same propagation runs in training, with one mark only:
`Absent`, on the stand-ins. It may never reach what a stage computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ModelError
from penstock.model.replay.recording.unit_calls import tensors_in

_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNSEEN = (  # read memory below every dispatch
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr,
    torch._VF._pad_packed_sequence, torch._VF._pack_padded_sequence,
)  # fmt: skip
_BY_SHAPE = frozenset(  # read no value of what they are given
    f"aten::{name}"
    for name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "empty_like", "full_like")
) | {"aten::ones_like", "aten::zeros_like", "aten::rand_like", "aten::randn_like"}


def fresh(tensor: Tensor) -> Tensor:
    """Copy a tensor into a storage of its own; one expanded element stays one element."""
    if tensor.numel() > 1 and not any(tensor.stride()):
        return tensor.as_strided((), ()).clone().expand(tensor.shape)
    return tensor.detach().clone()


class Storages:
    """Storages as keys. They are held weakly: their addresses are not used again, their memory is."""

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}

    def key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._held:
            self._held[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return key


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `on_operation` of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = Storages()

    def on_operation(self, func: Any, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        raise NotImplementedError

    def reads_values(self, func: Any) -> bool:
        """Return whether the operation's result decides something outside of tensors."""
        return any(tag in func.tags for tag in _BY_VALUE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        taken = [] if func._schema.name in _BY_SHAPE else tensors_in((args, kwargs), 0)
        self.on_operation(func, taken, tensors_in(result, 0), written)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(value, 0)
    return found


class Reads(TorchFunctionMode):
    """Tells of the few ways in which Python gets at a tensor's memory without an operation."""

    def __init__(self, on_read: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN:
            self._on_read(tensors_in(args, 0))
        return func(*args, **(kwargs or {}))


class Absent(Follower):
    """Follows stand-ins through the glue of one replay; `fail` gives the error for one that is read.

    And for what the glue writes to that it left alone with the example, so that each stage would do it once more.
    """

    def __init__(self, fail: Callable[[str], ModelError]) -> None:
        super().__init__()
        self._fail = fail
        self._absent: set[int] = set()
        self._unwritten: dict[int, str] = {}
        self.decides = False  # something in this run may decide the path, and another way in the next one
        self._reads = Reads(self.check_read)

    def add(self, tensors: Iterable[Tensor]) -> None:
        self._absent.update(map(self.storages.key, tensors))

    def touches(self, value: Any) -> bool:
        return any(self.storages.key(tensor) in self._absent for tensor in tensors_in(value))

    def guard(self, tensors: Iterable[Any], what: str) -> None:
        self._unwritten.update({self.storages.key(each): what for each in tensors if isinstance(each, Tensor)})

    def check_read(self, tensors: list[Tensor]) -> None:
        """Refuse to read a stand-in, which has no value that could decide anything."""
        self.decides = True
        if self._absent and self.touches(tensors):
            raise self._fail("a value was read that the example's run did not need here")

    def on_operation(self, func: Any, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        if self.reads_values(func):
            self.check_read(taken)
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.decides = True
        if self._absent and self.touches(taken):
            self.add([*made, *written])
        for tensor in written:
            if (what := self._unwritten.get(self.storages.key(tensor))) is not None:
                raise self._fail(f"its code changes {what} in place, which it left alone then")

    def __enter__(self) -> Any:
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let units of this stage run without being followed."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
