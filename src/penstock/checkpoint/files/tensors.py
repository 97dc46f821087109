"""The tensors of one process: a copy of them, and the safetensors file that the copy becomes.

The copy is the only thing that training waits for, so it is laid out as the body of the file from the start: one block
of memory, used again at the next save, whose pages are then there already. Widest types come first, so that every
tensor is aligned and none needs padding. A background thread writes the block, and no part of that holds Python's
lock: the training loop is not in its way. (safetensors' own writer holds it for the whole file.)
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.errors import FileError, UsageError
from penstock.reading import open_plain

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MOST_HEADER = 2**24  # bytes, for some hundred thousand tensors
PIECE = 8 * 2**20  # bytes that are written and summed at a time: they stay in the cache between the two


@dataclass(frozen=True)
class TensorEntry:
    """A piece of a tensor as the file has it: `shape` of the piece, `offsets` of the piece in the whole tensor."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def name_of_type(dtype: torch.dtype, key: str) -> str:
    name = TYPES.get(dtype)
    if name is None:
        raise UsageError(f"{key} has type {dtype}, which safetensors does not support; save it as another type")
    return name


class FileLayout:
    """Where each entry stands in the body, and the header that says so."""

    def __init__(self, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> None:
        self.entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        self.begins: list[int] = []
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for entry in self.entries:
            self.begins.append(end)
            end += entry.bytes
            header[entry.key] = {
                "dtype": name_of_type(entry.dtype, entry.key),
                "shape": list(entry.shape),
                "data_offsets": [self.begins[-1], end],
            }
        self.bytes = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text


class Body:
    """One block of memory for the copies of all entries."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fill(self, layout: FileLayout, value_of: Callable[[TensorEntry], Tensor]) -> None:
        """Copy every entry into its place; memory is asked for only where there is not enough."""
        self.reserve(layout.bytes)
        for entry, begin in zip(layout.entries, layout.begins, strict=True):
            self.put(begin, entry, value_of(entry))

    def reserve(self, size: int) -> None:
        if self._flat.numel() < size:
            self._flat, self._memory = (
                torch.empty(0, dtype=torch.uint8, device="cpu"),
                None,
            )  # given back before more is asked for
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)  # a fault for 2 MiB and not for 4 KiB
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)

    def put(self, begin: int, entry: TensorEntry, value: Tensor) -> None:
        if entry.bytes:
            self._flat[begin : begin + entry.bytes].view(entry.dtype).view(entry.shape).copy_(value)

    def view(self, size: int) -> memoryview:
        """Return the first `size` bytes, for writing them out."""
        return memoryview(self._memory if self._memory is not None else b"")[:size]


def open_tensors(path: Path) -> Any:
    """Return a file of safetensors, open; its header, which is parsed at every opening, has a bound."""
    descriptor = open_plain(path)
    with open(descriptor, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        size = os.fstat(descriptor).st_size
    if MOST_HEADER < header <= size:
        raise FileError(path, f"its header has {header:,} bytes; at most {MOST_HEADER:,} are read")
    return safe_open(path, framework="pt")


def streamed(layout: FileLayout, value_of: Callable[[TensorEntry], Tensor]) -> Iterator[memoryview]:
    """Yield the body of a file without a copy of all of it: one tensor at a time passes through the memory of the
    largest.
    """
    scratch = Body()
    scratch.reserve(max((entry.bytes for entry in layout.entries), default=0))
    for entry in layout.entries:
        scratch.put(0, entry, value_of(entry))
        yield scratch.view(entry.bytes)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write, and make sure that the disk has it; returns (bytes, CRC-32 in hex)."""
    size, value = 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), PIECE):
                part = view[begin : begin + PIECE]
                value = zlib.crc32(part, value)
                size += len(part)
                while len(part):
                    part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, f"{value:08x}"


def sync_directory(directory: Path) -> None:
    """Make sure that the disk has the names in a directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
