"""Shared memory in which messages lie: blocks, made by the rank that sends, mapped by the rank that receives.

A block is anonymous memory (a memfd: it has no name, is not bound by the size of /dev/shm, and is gone when the last
process that maps it is, however that ends). It holds one message at a time::

    | state, 8 bytes | unused, to 64 | tensor | pad to 64 | tensor | ...      (a frame of `layout`)

The sender sets the state to 1 before it tells of the message, and writes the block again only when the receiver has set
it back to 0. The receiver computes on the memory itself: its tensors are made over a memoryview that nothing else
holds, so that when the last of them dies, wherever it was kept, the memoryview dies too, and its end gives the block
back. No count is kept that could be wrong. That word is a plain store after plain loads of the data, seen by another
process. x86-64 keeps these in order; machines that may not are not offered shared memory (see `meeting`).

`posix_fallocate` allocates: where memory is refused it says so then, and not later by a bus error under somebody's
hands. The size is sealed for the same reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.runtime.transport.forks import EPOCH
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.runtime.transport.layout.layout import Frame, Layout
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES

PAGE = mmap.PAGESIZE
IDLE_STEPS = 4  # a block that has not been used for so many steps is given up
FRAMES = 4  # layouts of which a block remembers where their tensors lie
FREE, USED = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def allocate(size: int) -> int:
    """Allocate that much anonymous memory, zeroed; return its descriptor or raise an OSError where it is refused."""
    descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int) -> memoryview:
    """Map all of it; the mapping lives as long as anything that views it.

    By hand, because Python's own mmap keeps a descriptor open for each: a thousand blocks would use up what a
    process may have.
    """
    size = os.fstat(descriptor).st_size
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _munmap, address, size).atexit = False  # tensors may live until after that
    return memoryview(memory).cast("B")


def size_class(nbytes: int) -> int:
    """Return whole pages, and at most an eighth more than needed, so that shapes that differ a little share blocks."""
    grain = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return math.ceil(max(nbytes, 1) / grain) * grain


class OutBlock:
    """A block as its sender sees it."""

    __slots__ = ("_frames", "_tensor", "number", "size", "step", "words")

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.size = memory.nbytes
        self.step = 0  # The step of its last use.
        self.words = memory[:HEADER_BYTES].cast("Q")
        self._tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._frames: dict[Layout, Frame] = {}  # Those of the last few layouts that lay here: they come in turn.

    def pack(self, layout: Layout, leaves: Sequence[Any]) -> None:
        """Copy a value of that layout into the block."""
        frame = self._frames.get(layout)
        if frame is None:
            if len(self._frames) >= FRAMES:
                self._frames.clear()
            frame = self._frames[layout] = Frame(layout.frame_bytes, layout.copies, self._tensor)
        layout.pack(leaves, frame)


class BlockPool:
    """The blocks of one directed link, as many as were ever in use at once, by size."""

    def __init__(self, announce: Callable[[int, int], None], retire: Callable[[int], None]) -> None:
        self.nbytes = 0
        self.refused: OSError | None = None  # no more memory is to be had
        self.warned = False  # Set once the user has been warned.
        self._announce = announce
        self._retire = retire
        self._number = 0
        self._sizes: dict[int, deque[OutBlock]] = {}

    def put(self, layout: Layout, leaves: Sequence[Any], step: int) -> OutBlock | None:
        """Copy a value into a block that nobody uses, or a new one if all are in use; None where memory is refused."""
        size = size_class(layout.frame_bytes)
        blocks = self._sizes.get(size)
        if blocks is None:
            blocks = self._sizes[size] = deque()
        for _ in range(len(blocks)):
            block = blocks[0]
            blocks.rotate(-1)  # the one that was used longest ago is next
            if block.words[0] == FREE:
                break
        else:
            made = self._grow(size)
            if made is None:
                return None
            block = made
            blocks.append(block)
        block.step = step
        block.pack(layout, leaves)
        block.words[0] = USED
        return block

    def _grow(self, size: int) -> OutBlock | None:
        if self.refused is not None:
            return None
        try:
            descriptor = allocate(size)
        except OSError:
            self._release(lambda block: True)
            try:
                descriptor = allocate(size)
            except OSError as error:
                self.refused = error
                return None
        try:
            block = OutBlock(self._number, map_memory(descriptor))
            self._announce(block.number, descriptor)
        except OSError as error:
            self.refused = error
            return None
        finally:
            os.close(descriptor)
        self._number += 1
        self.nbytes += size
        return block

    def end_step(self, step: int) -> None:
        """Give up what shapes of the past have left."""
        if any(block.step + IDLE_STEPS < step for blocks in self._sizes.values() for block in blocks):
            self._release(lambda block: block.step + IDLE_STEPS < step)

    def _release(self, unwanted: Callable[[OutBlock], bool]) -> None:
        for size, blocks in self._sizes.items():
            for block in [block for block in blocks if block.words[0] == FREE and unwanted(block)]:
                blocks.remove(block)
                self.nbytes -= size
                self._retire(block.number)

    def clear(self) -> None:
        self._sizes.clear()


class _Lease(weakref.ref[memoryview]):
    """Sees the last tensor in a block die."""

    __slots__ = ("epoch", "words")

    epoch: int
    words: memoryview


@uninterrupted
def _give_back(lease: _Lease) -> None:
    if EPOCH[0] == lease.epoch:  # a fork's copy of the tensor is not the tensor
        lease.words[0] = FREE


class InBlock:
    """A block as its receiver sees it."""

    __slots__ = ("__weakref__", "_lease", "_memory", "_words")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._lease: _Lease | None = None

    def build(self, layout: Layout) -> Any:
        """Build the value that lies in the block, in place; the block goes back when the last of its tensors dies."""
        lease = self._memory[:]
        self._lease = watch = _Lease(lease, _give_back)
        watch.words, watch.epoch = self._words, EPOCH[0]
        lone = layout.lone
        if lone is None:
            return layout.build(torch.frombuffer(lease, dtype=torch.uint8, count=layout.frame_bytes), (), None)
        region = layout.regions[0]  # Its storage is as large as itself: whoever looks at that must not see the block.
        count = region.nbytes // lone.dtype.itemsize
        tensor = torch.frombuffer(lease, dtype=lone.dtype, count=count, offset=region.offset)
        tensor.as_strided_(lone.shape, lone.stride).requires_grad_(lone.requires_grad)
        return tensor if layout.form is torch.Tensor else layout.form((tensor,))

    def drop(self) -> None:
        """Give the block back: nobody wants what lies in it."""
        self._words[0] = FREE


def build_plain(layout: Layout) -> Any:
    """Build a value without a tensor that has any bytes."""
    return layout.build(torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu"), (), None)
