"""Who writes what: torch.distributed.checkpoint's planner, asked once and remembered while nothing changes.

Each process says what it has, replicated tensors are given to one of those who have them, and shards of a DTensor stay
with their owners: that is the planner's own work. Its plans are exchanged only when some process's names, shapes or
types are not those of the last save; then every process works out the same answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from penstock.checkpoint.files.tensors import FileLayout, TensorEntry, name_of_type
from penstock.errors import UsageError


class WritePlan(NamedTuple):
    """What this process writes, and where each tensor of all processes is."""

    layout: FileLayout
    items: Mapping[str, Any]
    tensors: dict[str, Any]  # key -> type, shape, chunks: as the index has it


class Planner:
    """One for a `Checkpointer`: it remembers the last plan."""

    def __init__(self) -> None:
        self._planner: DefaultSavePlanner | None = None
        self._local: SavePlan | None = None
        self._plan: WritePlan | None = None
        self._signature = ""

    def look(self, tensors: Mapping[str, Tensor]) -> str:
        """Return what this process has, as a digest; empty where that is what it had at the last save."""
        for key, tensor in tensors.items():
            name_of_type(tensor.dtype, key)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(tensors))
        local = planner.create_local_plan()
        text = repr([_answer(item) for item in local.items])
        signature = hashlib.sha256(text.encode()).hexdigest()
        changed = signature != self._signature or self._plan is None
        if changed:
            self._plan = None
        self._planner, self._local, self._signature = planner, local, signature
        return signature if changed else ""

    def agree(self, changed: bool, process: int, exchange: Callable[[Any], list[Any]]) -> WritePlan:
        """Make the plan; collective where `changed`, which must be the same on all processes."""
        assert self._planner is not None
        assert self._local is not None
        if changed or self._plan is None:
            answers = exchange([_answer(item) for item in self._local.items])
            plans, metadata = self._planner.create_global_plan(
                [SavePlan(list(map(_heard, items))) for items in answers]
            )
            self._plan = _plan_of(plans, metadata.state_dict_metadata, process)
        return self._plan

    def value_of(self, entry: TensorEntry) -> Tensor:
        """Return the tensor, or this process's shard of it, that an entry is a copy of."""
        assert self._planner is not None
        assert self._plan is not None
        found = self._planner.resolve_data(self._plan.items[entry.key])
        assert isinstance(found, Tensor)
        return found.detach()

    def forget(self) -> None:
        """Hold no tensor between saves."""
        self._planner = None


def _answer(item: WriteItem) -> tuple[Any, ...]:
    """Return one piece of a tensor as processes send it to each other, in plain values."""
    index, data = item.index, item.tensor_data
    assert data is not None
    offset = None if index.offset is None else tuple(index.offset)
    chunk = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return index.fqn, offset, index.index, item.type.name, *chunk, data.properties.dtype, tuple(data.size)


def _heard(answer: tuple[Any, ...]) -> WriteItem:
    name, offset, number, kind, offsets, sizes, dtype, size = answer
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(name, offset, number), WriteItemType[kind], tensor_data=data)


def file_of(process: int) -> str:
    return f"process-{process:05d}.safetensors"


def _plan_of(plans: list[SavePlan], metadata: Mapping[str, Any], process: int) -> WritePlan:
    homes: dict[tuple[str, tuple[int, ...]], str] = {}
    mine: dict[str, Any] = {}
    entries: list[TensorEntry] = []
    for number, plan in enumerate(plans):
        for item in plan.items:
            offsets = tuple(item.index.offset or ())
            homes[item.index.fqn, offsets] = file_of(number)
            if number == process:
                if item.index.fqn in mine:
                    raise UsageError(
                        f"this process has two pieces of {item.index.fqn}; a file holds one of each tensor"
                    )
                mine[item.index.fqn] = item
                data = item.tensor_data
                assert data is not None
                entries.append(TensorEntry(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), offsets))
    tensors = {}
    for key, found in metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        chunks = [
            {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": homes[key, tuple(chunk.offsets)]}
            for chunk in found.chunks
        ]
        dtype = str(found.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "shape": list(found.size), "chunks": chunks}
    return WritePlan(FileLayout(entries, _sharding(entries)), mine, tensors)


def _sharding(entries: list[TensorEntry]) -> dict[str, str]:
    """Return what torch's own HuggingFaceStorageReader looks for, so that plain DCP reads our files too."""
    info = {entry.key: {"saved_offsets": list(entry.offsets)} for entry in entries}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
