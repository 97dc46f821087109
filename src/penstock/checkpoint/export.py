"""A checkpoint's weights for other programs: safetensors under the model's own names.

Where the model came from transformers, the result is what `from_pretrained` takes: `config.json` beside the weights,
and an index where they are in several files. One tensor at a time is in memory.
"""

from __future__ import annotations

import json
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
from penstock.checkpoint.load.reading import CheckpointContents, open_whole
from penstock.errors import UsageError
from penstock.files.tensors import FileLayout, TensorEntry, streamed, sync_directory, write_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: tuple[Path, ...]
    tensors: int
    bytes: int
    huggingface: bool


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    file_bytes: int | None = None,
) -> Exported:
    """Write the weights to `out`: a file if its name ends in .safetensors, else a new directory.

    `dtype` turns floating-point tensors into another type; `file_bytes` is the most that one file holds.
    """
    path, goal = Path(checkpoint), Path(out).absolute()
    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"dtype={dtype!r}: choose one of {', '.join(FLOATS)}")
    if file_bytes is not None and file_bytes < 1:
        raise UsageError(f"file_bytes={file_bytes}: pass at least 1")
    if os.path.lexists(goal):
        raise UsageError(f"{goal} is there already; choose another name, or delete it first")
    manifest, contents = open_whole(path)
    return _Export(contents, manifest, dtype).write(goal, file_bytes)


class _Export:
    def __init__(self, contents: CheckpointContents, manifest: Manifest, dtype: str | None) -> None:
        self._contents = contents
        self._origin: Mapping[str, Any] | None = manifest.origin
        self._dtype = dtype
        self._entries = [self._entry(key) for key in sorted(contents.tensors) if key.startswith("model.")]

    def _entry(self, key: str) -> TensorEntry:
        saved = self._contents.tensors[key]
        own = getattr(torch, saved["dtype"])
        shape = tuple(saved["shape"])
        wanted = FLOATS[self._dtype] if self._dtype is not None and own.is_floating_point else own
        return TensorEntry(key.removeprefix("model."), wanted, shape, (0,) * len(shape))

    def _value_of(self, entry: TensorEntry) -> Tensor:
        return self._contents.tensor(f"model.{entry.key}").to(entry.dtype)

    def write(self, goal: Path, file_bytes: int | None) -> Exported:
        goal.parent.mkdir(parents=True, exist_ok=True)
        temporary = goal.with_name(f".{goal.name}.{secrets.token_hex(4)}")
        try:
            if goal.suffix == ".safetensors":
                if file_bytes is not None:
                    raise UsageError(f"{goal.name} is one file; for several, name a directory")
                self._write_weights(temporary, self._entries)
                names = []
            else:
                temporary.mkdir()
                names = self._write_directory(temporary, file_bytes)
                sync_directory(temporary)
            temporary.rename(goal)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(goal.parent)
        files = tuple(goal / name for name in names) or (goal,)
        size = sum(entry.bytes for entry in self._entries)
        return Exported(files, len(self._entries), size, bool(names) and self._origin is not None)

    def _write_directory(self, folder: Path, file_bytes: int | None) -> list[str]:
        parts = _parts(self._entries, file_bytes)
        names = [WEIGHTS]
        if len(parts) > 1:
            names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
        for name, part in zip(names, parts, strict=True):
            self._write_weights(folder / name, part)
        if len(parts) > 1:
            index = {
                "metadata": {"total_size": sum(entry.bytes for entry in self._entries)},
                "weight_map": {entry.key: name for name, part in zip(names, parts, strict=True) for entry in part},
            }
            write_file(folder / INDEX, [json.dumps(index, indent=2).encode()])
            names.append(INDEX)
        if self._origin is not None:
            config = dict(self._origin["config"])
            if self._dtype is not None:
                config["dtype"] = self._dtype
            write_file(folder / "config.json", [json.dumps(config, indent=2).encode()])
            names.append("config.json")
        return names

    def _write_weights(self, file: Path, entries: list[TensorEntry]) -> None:
        layout = FileLayout(entries, {"format": "pt"})
        write_file(file, chain([layout.header], streamed(layout, self._value_of)))


def _parts(entries: list[TensorEntry], most: int | None) -> list[list[TensorEntry]]:
    """Files of at most so many bytes each, in order; a larger tensor has a file for itself."""
    parts: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if most is not None and parts[-1] and size + entry.bytes > most:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.bytes
    return parts
