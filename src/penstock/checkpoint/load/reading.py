"""Tensors of a checkpoint into tensors of any layout, by torch.distributed.checkpoint's planner.

The planner says which piece of which saved tensor goes into which part of which tensor here; a shard of a DTensor takes
just what it needs of however many pieces were saved. No process waits for another. Files are read through safetensors,
which checks its header against the file and knows nothing but numbers. A whole tensor needs no planner, and so who only
wants some of those does not wait until torch has loaded it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.checkpoint.disk.manifest import Manifest, check_files, plain_name, read_index
from penstock.checkpoint.files.tensors import TYPES, open_tensors
from penstock.errors import CheckpointError

MOST_PAIRS = 400_000  # pieces of a tensor that share rows are compared in pairs: so many have 900 columns


class Chunk(NamedTuple):
    """A piece of a tensor: where it begins, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedTensor(NamedTuple):
    """What the index says of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[Chunk]


def open_whole(path: Path) -> tuple[Manifest, CheckpointContents]:
    """Open a checkpoint and compare every byte with its checksums; raise an error that lists what is wrong."""
    return check_files(path), CheckpointContents(path)


class CheckpointContents:
    """What a checkpoint holds: `index` as it was read, and its tensors on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self.tensors: dict[str, Any] = self.index["tensors"]
        try:
            self._metadata = {key: _metadata(saved) for key, saved in self.tensors.items()}
            self._homes = {
                (key, tuple(chunk["offsets"])): (plain_name(chunk["file"]), tuple(chunk["sizes"]))
                for key, saved in self.tensors.items()
                for chunk in saved["chunks"]
            }
            self._check_sizes()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"{path}: the index describes a tensor wrongly: {error!r}", path=path) from error
        except OSError as error:
            raise CheckpointError(f"{error.filename}, which the index names: {error.strerror}", path=path) from error

    def _check_sizes(self) -> None:
        """Check that no tensor is larger than the files that are to have it: the index decides how much memory is
        taken.
        """
        sizes = {name: os.stat(self.path / name).st_size for name in {name for name, _ in self._homes.values()}}
        pieces: set[tuple[str, str]] = set()
        for (key, _), (name, shape) in self._homes.items():
            if (key, name) in pieces:  # A file has one tensor of a name, which would be read again for each piece.
                raise ValueError(f"{name} is to have several pieces of {key}")
            pieces.add((key, name))
            need = math.prod(shape) * self._metadata[key].dtype.itemsize
            if need > sizes[name]:
                raise ValueError(f"{name} has {sizes[name]} bytes, and a piece of {key} in it is to have {need}")
        self.bytes = sum(sizes.values())

    def tensor(self, key: str) -> Tensor:
        """Read one whole tensor, on the CPU."""
        found = self._of(key)
        goal = torch.empty(found.size, dtype=found.dtype, device="cpu")
        for chunk in found.chunks:
            name, sizes = self._homes[key, chunk.offsets]
            try:
                with open_tensors(self.path / name) as file:
                    self._check_piece(file, name, key, sizes)
                    part = tuple(slice(begin, begin + size) for begin, size in zip(*chunk, strict=True))
                    goal[part].copy_(file.get_tensor(key))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / name}: {error}", path=self.path) from error
        return goal

    def bytes_of(self, key: str) -> int:
        """Return the bytes of one whole tensor."""
        found = self._of(key)
        return math.prod(found.size) * found.dtype.itemsize

    def _of(self, key: str) -> SavedTensor:
        found = self._metadata.get(key)
        if found is None:
            raise CheckpointError(f"{self.path}: the index has no tensor {key!r}", path=self.path)
        return found

    def fill(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read into these tensors, each under its key; shapes and types were compared before."""
        # loads a good part of torch
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import Metadata

        state = dict(targets)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        known = Metadata({key: _for_planner(saved) for key, saved in self._metadata.items()})
        planner.set_up_planner(state, known, is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        try:
            with ExitStack() as opened, torch.no_grad():
                files: dict[str, Any] = {}
                for item in plan.items:  # all are looked at before the first is copied
                    name, sizes = self._homes[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
                    if name not in files:
                        files[name] = opened.enter_context(open_tensors(self.path / name))
                    self._check_piece(files[name], name, item.storage_index.fqn, sizes)
                for item in plan.items:
                    key = item.storage_index.fqn
                    name, _ = self._homes[key, tuple(item.storage_index.offset or ())]
                    goal = planner.resolve_tensor(item)
                    goal.copy_(_piece(files[name], key, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, goal)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name}: {error}", path=self.path) from error
        return state

    def _check_piece(self, file: Any, name: str, key: str, sizes: tuple[int, ...]) -> None:
        piece, due = file.get_slice(key), TYPES[self._metadata[key].dtype]
        if tuple(piece.get_shape()) != sizes or piece.get_dtype() != due:
            raise CheckpointError(
                f"{self.path / name} has {key} as {piece.get_dtype()} {tuple(piece.get_shape())}; the index says "
                f"{due} {sizes}",
                path=self.path,
            )


def _piece(file: Any, key: str, offsets: Any, lengths: Any) -> Tensor:
    piece = file.get_slice(key)
    if not lengths or list(lengths) == list(piece.get_shape()):
        whole: Tensor = file.get_tensor(key)
        return whole
    part: Tensor = piece[tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))]
    return part


def _for_planner(saved: SavedTensor) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks]
    return TensorStorageMetadata(TensorProperties(saved.dtype), torch.Size(saved.size), chunks)


def _metadata(saved: Mapping[str, Any]) -> SavedTensor:
    dtype = getattr(torch, saved["dtype"])
    if not isinstance(dtype, torch.dtype) or dtype not in TYPES:
        raise ValueError(f"checkpoints have no dtype {saved['dtype']!r}")
    chunks = [
        Chunk(tuple(torch.Size(chunk["offsets"])), tuple(torch.Size(chunk["sizes"]))) for chunk in saved["chunks"]
    ]
    found = SavedTensor(dtype, tuple(torch.Size(saved["shape"])), chunks)
    _check_cover(found)
    return found


def _check_cover(found: SavedTensor) -> None:
    """Check that the pieces fill the tensor: the rest would stay as memory had it."""
    for chunk in found.chunks:
        ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(found.size) or any(
            begin < 0 or size < 0 or end > whole
            for begin, size, end, whole in zip(chunk.offsets, chunk.sizes, ends, found.size, strict=True)
        ):
            raise ValueError(f"a piece at {tuple(chunk.offsets)} does not fit a tensor of shape {tuple(found.size)}")
    if sum(math.prod(chunk.sizes) for chunk in found.chunks) != math.prod(found.size):
        raise ValueError(f"the pieces of a tensor of shape {tuple(found.size)} do not cover it")
    ordered, pairs = sorted(found.chunks, key=lambda chunk: tuple(chunk.offsets)), 0
    for number, chunk in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if not other.offsets or other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break  # All behind it start later.
            pairs += 1
            if pairs > MOST_PAIRS:
                raise ValueError(f"{len(ordered):,} pieces of a tensor are too many side by side")
            if _overlap(chunk, other):
                raise ValueError(f"two pieces of a tensor of shape {tuple(found.size)} overlap")


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        first < begin + length and begin < first + size
        for first, size, begin, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
