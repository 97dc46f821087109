"""A folder for `from_pretrained`, written by all ranks together.

Each rank writes the tensors of its own stages into files of its own, one tensor at a time, so that nobody ever has the
whole model. Replicas and ranks with parts of the same tensors take part in putting each tensor together, and the
first of them writes. The folder is built under another name and renamed when everybody is done; whoever fails still
goes through the rest with the others, and then all raise the same error.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.checkpoint.files.adapters import ADAPTER_WEIGHTS, is_adapter, merged, stored_names
from penstock.checkpoint.files.pretrained_writing import (
    file_names,
    parts_of,
    write_configs,
    write_index,
    write_tokenizer,
)
from penstock.checkpoint.files.tensors import FileLayout, TensorEntry, streamed, sync_directory, write_file
from penstock.errors import CheckpointError, PeerFailure, UsageError
from penstock.parallel.group.agreement import in_words
from penstock.pipeline.model_state.other_ranks import WholeModel
from penstock.rules import is_count

if TYPE_CHECKING:
    from penstock.pipeline.model_state.state import ModelState

CALL = "save_pretrained()"
METADATA = {"format": "pt"}


def save_pretrained(
    state: ModelState,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_size: int = 5_000_000_000,
    merge_adapters: bool = False,
) -> None:
    """Write the model as a folder that transformers' `from_pretrained` loads. Call it on every rank.

    Each rank writes the tensors of its own stages, one at a time. The folder is there when it is complete, or not
    at all, and an error on one rank is raised on all. A model with peft's adapters is saved as these adapters,
    in peft's format.

    Args:
        folder: The folder to write; it must not be there yet. With several hosts, on a file system they share.
        tokenizer: A tokenizer with `save_pretrained`, or the folder of one. By default, the tokenizer that lies
            in the folder the model was loaded from, if there is one.
        max_shard_size: The most bytes that one file holds.
        merge_adapters: Whether to add adapters to the weights and save a model without adapters.
    """
    state.check_values()
    saving = _ModelFolder(state, Path(folder).absolute(), tokenizer, merge_adapters)
    most = max_shard_size
    with state.deployment.world.calling(CALL):
        try:
            saving.on_all(lambda: saving.prepare(most))
            saving.meet()
            saving.on_all(saving.write_adapters if saving.only_adapters else lambda: saving.write_parts(most))
            saving.on_all(saving.finish)
        except BaseException:
            saving.give_up()
            raise


class _ModelFolder:
    def __init__(self, state: ModelState, goal: Path, tokenizer: Any, merge: bool) -> None:
        self._state, self._deployment, self._goal = state, state.deployment, goal
        self._tokenizer, self._merge = tokenizer, merge
        self._origin = state.deployment.staged.origin or {}
        self.only_adapters = "adapter" in self._origin and not merge
        self._temporary = goal
        self._weight_map: dict[str, str] = {}
        self._total = 0
        self._dtype: torch.dtype | None = None
        replicas = state.deployment.replication
        self._writes = replicas.leads  # This rank writes for its copies, and for those with other parts of its tensors.
        self._first = self._writes and 0 in state.deployment.ranks.executors

    def on_all(self, work: Callable[[], None]) -> None:
        """Do something on every rank; what fails on one is the same error on all."""
        own: Exception | None = None
        try:
            work()
        except PeerFailure:
            raise
        except Exception as error:
            own = error
        mine = None if own is None else (isinstance(own, UsageError), in_words(own))
        found = [
            (rank, *each) for rank, each in enumerate(self._deployment.world.all_gather(CALL, mine)) if each is not None
        ]
        across = [each for each in self._deployment.replication.all_gather(CALL, found[0] if found else None) if each]
        if across:
            rank, usage, words = across[0]
            if usage:
                raise UsageError(words) from own
            raise CheckpointError(f"rank {rank} could not save {self._goal}: {words}", path=self._goal) from own

    def prepare(self, most: int) -> None:
        """Refuse what cannot work, and make the folder that is going to be renamed."""
        if not is_count(most) or most < 1:
            raise UsageError(f"max_shard_size={most!r}: pass a number of bytes, such as 5_000_000_000")
        if self._merge and "adapter" not in self._origin:
            raise UsageError("merge_adapters=True, but no adapters of peft are in this model; leave it out")
        if not self._origin:
            raise UsageError(
                f"{type(self._deployment.staged.model).__name__} is no model of transformers, so there is no "
                f"config.json to write; use full_state_dict() or a checkpoint"
            )
        if self._first:
            if os.path.lexists(self._goal):
                raise UsageError(f"{self._goal} is there already; choose another name, or delete it first")
            self._goal.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = self._goal.with_name(f".{self._goal.name}.{secrets.token_hex(4)}")
            self._temporary.mkdir()

    def meet(self) -> None:
        """Learn, as all that write must, the folder's name for now, and what everybody has."""
        names = self._deployment.world.all_gather(CALL, self._temporary.name)
        self._temporary = self._goal.with_name(names[0])
        self._whole = WholeModel(self._state, 0, CALL)

    def write_adapters(self) -> None:
        """Write all adapters into the one file that peft reads, by the first rank; they are small."""
        names = stored_names(self._whole.sources, merge=False)
        tensors = {names[name]: value for name, value in self._whole if is_adapter(name)}
        if self._first:
            entries = [_entry(name, value) for name, value in tensors.items()]
            layout = FileLayout(entries, METADATA)
            body = streamed(layout, lambda entry: tensors[entry.key])
            write_file(self._temporary / ADAPTER_WEIGHTS, chain([layout.header], body))

    def write_parts(self, most: int) -> None:
        """Write this rank's tensors, in files of at most so many bytes."""
        whole, world = self._whole, self._deployment.world
        rank = min(self._deployment.ranks.executors)
        mine = [name for name, source in whole.sources.items() if source == rank]
        mine = [name for name in mine if isinstance(whole.own[name], Tensor)]
        names = stored_names(mine, merge=True) if self._merge else {name: name for name in mine}
        entries = {_entry(names[name], whole.own[name]): name for name in names}
        parts = [part for part in parts_of(list(entries), most) if part]
        told = world.all_gather(CALL, [[(entry.key, entry.bytes) for entry in part] for part in parts])
        counts = [len(each) for each in told]
        files = file_names(sum(counts))
        for file, part in zip(files, chain.from_iterable(told), strict=True):
            self._weight_map |= {key: file for key, _ in part}
            self._total += sum(size for _, size in part)
        floats = Counter(entry.dtype for entry in entries if entry.dtype.is_floating_point)
        self._dtype = max(floats, key=lambda each: floats[each], default=None)
        begin = sum(counts[:rank])
        failed: list[Exception] = []
        for file, part in zip(files[begin:], parts, strict=False):
            layout = FileLayout(part, METADATA)
            self._write_part(file, layout, streamed(layout, lambda entry: self._value(entries[entry])), failed)
        if failed:
            raise failed[0]

    def _write_part(self, file: str, layout: FileLayout, body: Iterator[memoryview], failed: list[Exception]) -> None:
        """Write one file; where that fails, go through its tensors all the same: others hold parts of them."""
        try:
            if self._writes and not failed:
                write_file(self._temporary / file, chain([layout.header], body))
        except OSError as error:
            failed.append(error)
        for _ in body:
            pass

    def _value(self, name: str) -> Tensor:
        found: Tensor = self._whole.get(name)
        return merged(name, found, self._beside, self._origin["adapter"]) if self._merge else found

    def _beside(self, name: str) -> Tensor | None:
        """Return a part of an adapter, which is on the rank of the layer that it belongs to."""
        if name not in self._whole.own and name in self._whole.sources:
            raise UsageError(
                f"{name} is on another rank than the weight that it belongs to; save the adapters by themselves, "
                f"without merge_adapters, or cut the model between layers"
            )
        return self._whole.get(name) if name in self._whole.own else None

    def finish(self) -> None:
        """Write what belongs to the weights, and give the folder its real name; on the first rank."""
        if not self._first:
            return
        folder = self._temporary
        if len(set(self._weight_map.values())) > 1:
            write_index(folder, self._weight_map, self._total)
        write_configs(folder, self._origin, dtype=self._dtype, adapter=self.only_adapters)
        write_tokenizer(folder, self._tokenizer, self._origin)
        sync_directory(folder)
        folder.rename(self._goal)
        sync_directory(self._goal.parent)

    def give_up(self) -> None:
        if self._first and self._temporary != self._goal:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _entry(name: str, value: Tensor) -> TensorEntry:
    return TensorEntry(name, value.dtype, tuple(value.shape), (0,) * value.dim())
