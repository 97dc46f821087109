"""Tensors of a checkpoint into tensors of any layout, by torch.distributed.checkpoint's planner.

The planner says which piece of which saved tensor goes into which part of which tensor here; a shard of a DTensor takes
just what it needs of however many pieces were saved. No process waits for another. Files are read through safetensors,
which checks its header against the file and knows nothing but numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.errors import CheckpointError
from penstock.train.checkpoint.manifest import PLAIN_NAME, read_index

__all__ = ["Contents"]


class Contents:
    """What a checkpoint holds: `index` as it was read, and its tensors on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self.tensors: dict[str, Any] = self.index["tensors"]
        try:
            self._metadata = {key: _metadata(saved) for key, saved in self.tensors.items()}
            self._homes = {
                (key, tuple(chunk["offsets"])): _plain(chunk["file"])
                for key, saved in self.tensors.items()
                for chunk in saved["chunks"]
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: the index describes a tensor wrongly: {error!r}", path=path) from error

    def tensor(self, key: str) -> Tensor:
        """One whole tensor, on the CPU."""
        return self.fill({key: self.room(key)})[key]

    def room(self, key: str) -> Tensor:
        """Memory for one whole tensor."""
        found = self._metadata.get(key)
        if found is None:
            raise CheckpointError(f"{self.path}: the index has no tensor {key!r}", path=self.path)
        return torch.empty(found.size, dtype=found.properties.dtype)

    def fill(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read into these tensors, each under its key; shapes and types were compared before."""
        state = dict(targets)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, Metadata(dict(self._metadata)), is_coordinator=True)
        plan = planner.finish_plan(planner.create_local_plan())
        try:
            with ExitStack() as opened, torch.no_grad():
                files: dict[str, Any] = {}
                for item in plan.items:
                    key = item.storage_index.fqn
                    name = self._homes[key, tuple(item.storage_index.offset or ())]
                    if name not in files:
                        files[name] = opened.enter_context(safe_open(self.path / name, framework="pt"))
                    goal = planner.resolve_tensor(item)
                    found = _piece(files[name], key, item.storage_offsets, item.lengths)
                    if found.dtype != goal.dtype or found.shape != goal.shape:
                        raise CheckpointError(
                            f"{self.path / name} has {key} as {found.dtype} {tuple(found.shape)}; the index says "
                            f"{goal.dtype} {tuple(goal.shape)}",
                            path=self.path,
                        )
                    goal.copy_(found)
                    planner.commit_tensor(item, goal)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / name}: {error}", path=self.path) from error
        return state


def _piece(file: Any, key: str, offsets: Any, lengths: Any) -> Tensor:
    piece = file.get_slice(key)
    if not lengths or list(lengths) == list(piece.get_shape()):
        whole: Tensor = file.get_tensor(key)
        return whole
    part: Tensor = piece[tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))]
    return part


def _plain(name: Any) -> str:
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _metadata(saved: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype = getattr(torch, saved["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {saved['dtype']!r}")
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in saved["chunks"]
    ]
    found = TensorStorageMetadata(TensorProperties(dtype), torch.Size(saved["shape"]), chunks)
    _check_cover(found)
    return found


def _check_cover(found: TensorStorageMetadata) -> None:
    """The pieces lie inside the tensor and are as many numbers as it has: else some would stay as memory had them."""
    for chunk in found.chunks:
        ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(found.size) or any(
            begin < 0 or size < 0 or end > whole
            for begin, size, end, whole in zip(chunk.offsets, chunk.sizes, ends, found.size, strict=True)
        ):
            raise ValueError(f"a piece at {tuple(chunk.offsets)} of a tensor of shape {tuple(found.size)}")
    if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
        raise ValueError(f"the pieces of a tensor of shape {tuple(found.size)} do not cover it")
