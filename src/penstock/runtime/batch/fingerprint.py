"""What a rank was given for a step, in a few numbers that ranks can compare.

A rank uses only what its stages need: the first stage's rank the inputs, the last stage's the target. Ranks that load
rows of their own, by their number in the world, would so train inputs against the labels of other rows, and nothing
fails. So on processes every rank says in every step what it was given, argument by argument: one checksum each, of
names, shapes, dtypes, plain values and numbers. All numbers count in a pipeline's first step, and of tensors up to
`WHOLE` bytes always. Of a larger one, some count that are spread over it, others in each step, and the sum of all: that
of whole numbers as it is, that of fractions by whether it is finite, so that a single NaN shows. Of tensors on another
device than the CPU, copies are on their way while the step runs, and are read at its end.

Where checksums differ, `FingerprintedBatch.details` has what is behind them: fractions may differ by what devices round
differently (a teacher's output, for one). See `comparison`.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import on_accelerator
from penstock.runtime.batch.microbatch import Shared
from penstock.runtime.messages import plain

WHOLE = 1 << 16  # bytes of a tensor that count in every step
SAMPLE = 256  # numbers of a larger one
TURN, PLACE = 7919, 104729  # how far apart places are from step to step, and from part to part
# Share of the largest number of a tensor; bfloat16 has steps of 0.008.
ROUNDING = 0.02
ROUNDING_OF_FLOATS = 1e-4
SHOWN = 60  # characters of a plain value
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
SUMMED = {  # the dtypes that torch can sum, and in which dtype it does
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **{dtype: dtype for dtype in (torch.float32, torch.float64)},
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
}

_PARTS = torch.arange(SAMPLE, device="cpu")

BatchFingerprint = tuple[bool, dict["Key", int]]  # whether all numbers count, and the checksum of each argument
# The key of an argument: its position, its name, or ("loss", its name among loss_kwargs).
Key = int | str | tuple[str, str]


class Detail(NamedTuple):
    """One leaf of an argument: where it is in it, what it is in words, and a checksum of what must be equal.

    `numbers` are fractions, which may differ by `rounding` times the largest of them.
    """

    path: str
    words: str
    exact: int = 0
    numbers: tuple[float, ...] = ()
    rounding: float = ROUNDING


plain.register(Detail, path=str, words=str, exact=int, numbers=tuple, rounding=float)


class _TensorSample:
    """What was kept of one tensor, until somebody asks for it."""

    def __init__(self, path: str, words: str, kept: Tensor, total: Tensor | None = None, whole: int = 0) -> None:
        self._path, self._words = path, words
        self._whole = whole  # a checksum of all, where only some are kept
        # Of all numbers or of some, a copy; from a device into memory that it writes while the host goes on.
        self._kept = kept.to("cpu", non_blocking=True)
        self._total = None if total is None else total.to("cpu", non_blocking=True)

    def checksum(self, start: int) -> int:
        words, exact = self._read()
        return zlib.crc32(f"{self._path} {words} {exact} {self._whole}".encode(), _checksum(self._kept, start))

    def detail(self) -> Detail:
        words, exact = self._read()
        if self._kept.is_floating_point():
            return Detail(self._path, words, numbers=tuple(self._kept.double().flatten().tolist()))
        return Detail(self._path, words, _checksum(self._kept, exact ^ self._whole))

    def _read(self) -> tuple[str, int]:
        """Return a description, and the sum of whole numbers."""
        total = 0 if self._total is None else self._total.item()
        if isinstance(total, int):
            return self._words, total & 0xFFFFFFFF
        return self._words if math.isfinite(total) else f"{self._words} with nan or inf", 0


class FingerprintedBatch:
    """All that one rank was given for one step, by argument."""

    def __init__(
        self, leaves: Mapping[Key, Sequence[Detail | _TensorSample]], whole: bool, devices: Iterable[torch.device] = ()
    ) -> None:
        self.whole = whole  # whether all numbers count
        self._leaves = leaves
        # On the devices that copies come from, when these are complete.
        self._copied = [torch.accelerator.current_stream(device).record_event() for device in devices]

    @property
    def pending(self) -> bool:
        """Whether devices may not have come to their copies yet."""
        return bool(self._copied)

    def _arrive(self) -> None:
        """Wait for what devices copy."""
        while self._copied:
            copied = self._copied.pop()
            # It mostly is on the last stage's rank, which has read losses by then.
            if not copied.query():
                copied.synchronize()

    def fingerprint(self) -> BatchFingerprint:
        """Return what goes into the report of a step."""
        self._arrive()
        found = {}
        for name, leaves in self._leaves.items():
            checksum = 0
            for leaf in leaves:
                if isinstance(leaf, Detail):
                    checksum = zlib.crc32(repr(leaf).encode(), checksum)
                else:
                    checksum = leaf.checksum(checksum)
            found[name] = checksum
        return self.whole, found

    def details(self, names: Iterable[Key] | None = None) -> dict[Key, list[Detail]]:
        """Return what is behind the checksums of these arguments, of those that were given; by default, of all."""
        self._arrive()
        return {
            name: [leaf if isinstance(leaf, Detail) else leaf.detail() for leaf in self._leaves[name]]
            for name in (self._leaves if names is None else names)
            if name in self._leaves
        }


def fingerprint_batch(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any], turn: int, whole: bool
) -> FingerprintedBatch:
    """Describe what this rank was given for a step; None counts as nothing. `turn` numbers steps on all ranks."""
    named: dict[Key, Any] = dict(enumerate(args))
    named.update(kwargs)
    named["target"] = target
    named.update({("loss", name): value for name, value in loss_kwargs.items()})
    given = {name: list(_leaves(value, "")) for name, value in named.items() if value is not None}
    every = (leaf for leaves in given.values() for _, leaf in leaves)
    devices = {leaf.device for leaf in every if isinstance(leaf, Tensor) and not leaf.is_cpu}
    devices = {each for each in devices if on_accelerator(each)}
    return FingerprintedBatch(
        {name: [_sample_leaf(path, leaf, turn, whole) for path, leaf in leaves] for name, leaves in given.items()},
        whole,
        devices,
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield all that is in a value, in an order that does not depend on how it was put together."""
    if isinstance(value, Tensor) or type(value) in PLAIN:
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        if all(type(item) in PLAIN for item in value):
            yield path, repr(value)
            return
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    elif isinstance(value, Shared):
        yield from _leaves(value.value, path)
    else:
        inside = pytree.tree_leaves(value)
        if len(inside) == 1 and inside[0] is value:
            yield path, value
        else:
            yield from _leaves(inside, path)


def _sample_leaf(path: str, leaf: Any, turn: int, whole: bool) -> Detail | _TensorSample:
    if not isinstance(leaf, Tensor):
        return _plain(path, leaf)
    words = _words(leaf.dtype, leaf.shape)
    ordinary = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    if not ordinary or leaf.is_quantized or leaf.is_meta:
        return Detail(path, f"{words} in a {type(leaf).__name__} ({leaf.layout})")
    leaf = leaf.detach().resolve_conj().resolve_neg()
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    if leaf.dtype not in SUMMED:
        leaf = leaf.flatten().view(torch.uint8)
    if leaf.numel() * leaf.element_size() <= WHOLE:
        return _TensorSample(path, words, leaf.clone(memory_format=torch.contiguous_format))
    exact = _checksum(leaf.cpu().contiguous(), 0) if whole else 0
    return _TensorSample(path, words, _spread(leaf, turn), leaf.sum(dtype=SUMMED[leaf.dtype]), exact)


def _plain(path: str, leaf: Any) -> Detail:
    if type(leaf) is float:
        return Detail(path, "float", 0, (leaf,), ROUNDING_OF_FLOATS)
    if type(leaf) in PLAIN:
        text = leaf if type(leaf) is str else repr(leaf)
        return Detail(path, text if len(text) <= SHOWN else f"{text[:SHOWN]}...", zlib.crc32(text.encode()))
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes") and not leaf.dtype.hasobject:
        return Detail(path, f"numpy {leaf.dtype} {leaf.shape}", zlib.crc32(leaf.tobytes()))
    return Detail(path, f"a {type(leaf).__qualname__}")


def _spread(values: Tensor, turn: int) -> Tensor:
    """Return some numbers of a tensor: one of each of its `SAMPLE` parts, but not at the same place in all."""
    width = values.numel() // SAMPLE
    places = _PARTS * width + (_PARTS * PLACE + turn * TURN) % width
    return values.take(places if values.is_cpu else places.to(values.device, non_blocking=True))


def _checksum(dense: Tensor, start: int) -> int:
    size = dense.numel() * dense.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(dense.data_ptr()), start) if size else start


@lru_cache(maxsize=512)
def _words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def alike(one: Sequence[float], other: Sequence[float], rounding: float) -> bool:
    """Return whether samples are the same, up to a share of the largest number."""
    slack = rounding * max((abs(value) for value in one if math.isfinite(value)), default=0.0)
    return all(a == b or (a != a and b != b) or abs(a - b) <= slack for a, b in zip(one, other, strict=True))


def sample(values: Tensor, count: int) -> list[float]:
    """Return some numbers of a tensor, evenly spread."""
    values = torch.view_as_real(values) if values.is_complex() else values
    # This makes no copy.
    flat = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True)).reshape(-1)
    return [float(value) for value in flat[:: max(1, flat.numel() // count)][:count].tolist()]
