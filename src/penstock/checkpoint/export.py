"""A checkpoint's weights for other programs: safetensors under the model's own names.

Where the model came from transformers, the result is what `from_pretrained` takes: configurations and tokenizer beside
the weights, and an index where they are in several files. Of a model with peft's adapters it is the adapter, or the
model with the adapter added to its weights. One tensor at a time is in memory.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.disk.manifest import Manifest
from penstock.checkpoint.files.adapters import ADAPTER_WEIGHTS, is_adapter, merged, stored_names
from penstock.checkpoint.files.pretrained import PretrainedFolder
from penstock.checkpoint.files.pretrained_writing import (
    file_names,
    parts_of,
    write_configs,
    write_index,
    write_tokenizer,
)
from penstock.checkpoint.files.tensors import FileLayout, TensorEntry, streamed, sync_directory, write_file
from penstock.checkpoint.load.reading import CheckpointContents, open_whole
from penstock.checkpoint.named_tensors import AVERAGE
from penstock.errors import UsageError

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int
    huggingface: bool
    adapter: bool = False


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    file_bytes: int | None = None,
    merge: bool = False,
    tokenizer: str | None = None,
    averages: bool = False,
) -> Exported:
    """Write the weights to `out`: a file if its name ends in .safetensors, else a new directory.

    `dtype` turns floating-point tensors into another type; `file_bytes` is the most that one file holds; `merge` adds
    adapters to the weights; `tokenizer` is a folder, by default that of the model; `averages` writes the moving
    averages of parameters in the place of those that have one.
    """
    path, goal = Path(checkpoint), Path(out).absolute()
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype={dtype!r}: choose one of {', '.join(FLOATS)}")
    if file_bytes is not None and file_bytes < 1:
        raise UsageError(f"file_bytes={file_bytes}: pass at least 1")
    if os.path.lexists(goal):
        raise UsageError(f"{goal} already exists; choose another name, or delete it first")
    manifest, contents = open_whole(path)
    if averages and not any(key.startswith(AVERAGE) for key in contents.tensors):
        raise UsageError(
            f"{path} has no averages of weights; train with training.ema, or export the weights themselves"
        )
    writer = _Export(contents, manifest, dtype, merge, averages)
    return writer.write(goal, file_bytes, tokenizer or _tokenizer_of(manifest))


def _tokenizer_of(manifest: Manifest) -> str | None:
    """Return the tokenizer that a run of `penstock train` was configured with, if it is still where it was."""
    config = manifest.config if isinstance(manifest.config, dict) else {}
    data = config.get("data")
    named = data.get("tokenizer") if isinstance(data, dict) else None
    return named if isinstance(named, str) and named and Path(named).exists() else None


class _Export:
    def __init__(
        self, contents: CheckpointContents, manifest: Manifest, dtype: str | None, merge: bool, averages: bool
    ) -> None:
        self._contents, self._averages = contents, averages
        self._origin: Mapping[str, Any] = manifest.origin or {}
        self._dtype, self._merge = dtype, merge
        self.adapter = "adapter" in self._origin and not merge
        if merge and "adapter" not in self._origin:
            raise UsageError("--merge adds adapters to the weights, and the checkpoint's model has none; leave it out")
        keys = [key.removeprefix("model.") for key in sorted(contents.tensors) if key.startswith("model.")]
        self._base = self._base_folder(keys) if merge else None
        names = {name: name for name in keys}
        if "adapter" in self._origin:
            names = stored_names(keys, merge)
        if self._base is not None:
            names = {name: name for name in self._base.tensors}
        self._names = {stored: name for name, stored in names.items()}
        self._entries = [self._entry(name, stored) for name, stored in sorted(names.items())]

    def _base_folder(self, keys: list[str]) -> PretrainedFolder | None:
        """Return the folder with the weights that a checkpoint of adapters leaves out."""
        if not all(map(is_adapter, keys)):
            return None
        folder = self._origin.get("folder", "")
        if not folder or not Path(folder).is_dir():
            raise UsageError(
                f"--merge needs the weights that the adapter was made for, and {folder or 'their folder'} is not there"
            )
        return PretrainedFolder(folder)

    def _entry(self, name: str, stored: str) -> TensorEntry:
        if self._base is not None:
            shape, own = self._base.tensors[name].shape, self._base.tensors[name].dtype
        else:
            saved = self._contents.tensors[f"model.{name}"]
            shape, own = tuple(saved["shape"]), getattr(torch, saved["dtype"])
        wanted = FLOATS[self._dtype] if self._dtype is not None and own.is_floating_point else own
        return TensorEntry(stored, wanted, shape, (0,) * len(shape))

    def _value_of(self, entry: TensorEntry) -> Tensor:
        name = self._names[entry.key]
        if self._base is not None:
            value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self._base(name, value)
            layer, _, last = name.rpartition(".")
            name = f"{layer}.base_layer.{last}"  # Its name where there is an adapter beside it.
        else:
            value = self._saved(name)
        if self._merge:
            value = merged(name, value, self._tensor, self._origin["adapter"])
        return value.to(entry.dtype)

    def _tensor(self, name: str) -> Tensor | None:
        return self._saved(name) if f"model.{name}" in self._contents.tensors else None

    def _saved(self, name: str) -> Tensor:
        averaged = f"{AVERAGE}{name}"
        has = self._averages and averaged in self._contents.tensors
        return self._contents.tensor(averaged if has else f"model.{name}")

    def write(self, goal: Path, file_bytes: int | None, tokenizer: str | None) -> Exported:
        goal.parent.mkdir(parents=True, exist_ok=True)
        temporary = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}")
        try:
            if goal.suffix == ".safetensors":
                if file_bytes is not None:
                    raise UsageError(f"{goal.name} is one file; to write several, name a directory")
                self._write_weights(temporary, self._entries)
                names = []
            else:
                temporary.mkdir()
                names = self._write_directory(temporary, file_bytes, tokenizer)
                sync_directory(temporary)
            temporary.rename(goal)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(goal.parent)
        files = tuple(goal / name for name in names) or (goal,)
        size = sum(entry.bytes for entry in self._entries)
        huggingface = bool(names) and "config" in self._origin and not self.adapter
        return Exported(files, len(self._entries), size, huggingface, bool(names) and self.adapter)

    def _write_directory(self, folder: Path, file_bytes: int | None, tokenizer: str | None) -> list[str]:
        parts = [self._entries] if self.adapter else parts_of(self._entries, file_bytes)
        names = [ADAPTER_WEIGHTS] if self.adapter else file_names(len(parts))
        for name, part in zip(names, parts, strict=True):
            self._write_weights(folder / name, part)
        if len(parts) > 1:
            places = {entry.key: name for name, part in zip(names, parts, strict=True) for entry in part}
            names.append(write_index(folder, places, sum(entry.bytes for entry in self._entries)))
        dtype = None if self._dtype is None else FLOATS[self._dtype]
        names += write_configs(folder, self._origin, dtype=dtype, adapter=self.adapter)
        return names + write_tokenizer(folder, tokenizer, self._origin)

    def _write_weights(self, file: Path, entries: list[TensorEntry]) -> None:
        layout = FileLayout(entries, {"format": "pt"})
        write_file(file, chain([layout.header], streamed(layout, self._value_of)))
