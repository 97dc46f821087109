"""What a folder for `from_pretrained` has beside tensors: names of files, index, configurations, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.files import TOKENIZER_FILES
from penstock.checkpoint.files.adapters import ADAPTER_CONFIG
from penstock.checkpoint.files.tensors import TensorEntry, write_file
from penstock.checkpoint.files.weights import INDEX, WEIGHTS
from penstock.errors import UsageError
from penstock.reading import MOST_SETTINGS, plain_path, read_json


def parts_of(entries: Sequence[TensorEntry], most: int | None) -> list[list[TensorEntry]]:
    """Divide tensors into files of at most so many bytes each, in order; a larger tensor has a file for itself."""
    parts: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if most is not None and parts[-1] and size + entry.bytes > most:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.bytes
    return parts


def file_names(count: int) -> list[str]:
    """Return the names of so many files of weights, as transformers looks for them."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_json(file: Path, document: Any) -> str:
    write_file(file, [json.dumps(document, indent=2).encode()])
    return file.name


def write_index(folder: Path, weight_map: Mapping[str, str], total: int) -> str:
    return write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(weight_map)})


def write_configs(
    folder: Path, origin: Mapping[str, Any] | None, *, dtype: torch.dtype | None, adapter: bool
) -> list[str]:
    """Write the configurations that belong to the weights, or to the adapter; return the names of the files."""
    origin = origin or {}
    if adapter:
        return [write_json(folder / ADAPTER_CONFIG, origin["adapter"])]
    names = []
    if "config" in origin:
        own = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}
        names.append(write_json(folder / "config.json", {**origin["config"], **own}))
    if "generation_config" in origin:
        names.append(write_json(folder / "generation_config.json", origin["generation_config"]))
    return names


def write_tokenizer(folder: Path, tokenizer: Any, origin: Mapping[str, Any] | None) -> list[str]:
    """Write the files of a tokenizer: an object's own, those of the folder that it names, or of the model's folder."""
    if tokenizer is not None and callable(getattr(tokenizer, "save_pretrained", None)):
        before = set(folder.iterdir())
        tokenizer.save_pretrained(folder)
        return sorted(file.name for file in set(folder.iterdir()) - before)
    source = Path((origin or {}).get("folder", "")) if tokenizer is None else Path(tokenizer)
    if source.is_file():  # a tokenizer.json by itself; it may be named in a checkpoint of anybody
        if "model" not in read_json(source, most=MOST_SETTINGS):
            raise UsageError(f"{source}: it is no tokenizer.json, which has a model in it")
        shutil.copyfile(source, folder / TOKENIZER_FILES[0])
        return [TOKENIZER_FILES[0]]
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()] if source.parts else []
    if tokenizer is not None and not found:
        raise UsageError(f"tokenizer={str(source)!r} has none of the files of a tokenizer, such as tokenizer.json")
    # What is exported may be given away, so a link must not take along what is elsewhere; a cache of the hub keeps all
    # files of its models in a folder of blobs beside that of the snapshots.
    inside = (source.resolve(), source.resolve().parent.parent / "blobs") if found else ()
    for name in found:
        if not any((goal := (source / name).resolve()).is_relative_to(each) for each in inside):
            raise UsageError(f"{source / name}: it is a link to {goal}, outside of the folder; put a copy in its place")
        shutil.copyfile(plain_path(goal), folder / name)
    return found
