"""Whole tensors of a checkpoint as numpy arrays, for who does without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from penstock.checkpoint.disk.manifest import check_files, plain_name, read_index
from penstock.errors import CheckpointError


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The model's parameters and buffers by name, after every byte was compared with its checksum.

    Parameters of which the checkpoint has a moving average are the average, as in evaluations.

    Only types that numpy has: bfloat16 is an error.
    """
    check_files(path)
    tensors: dict[str, Any] = read_index(path)["tensors"]
    try:
        names = [key.removeprefix("model.") for key in tensors if key.startswith("model.")]
        keys = {name: f"average.{name}" if f"average.{name}" in tensors else f"model.{name}" for name in names}
        return {name: _array(path, key, tensors[key]) for name, key in keys.items()}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the tensors are not as the index says: {error!r}", path=path) from error


def _array(path: Path, key: str, saved: dict[str, Any]) -> NDArray[Any]:
    pieces: list[tuple[list[int], NDArray[Any]]] = []
    for chunk in saved["chunks"]:
        with safe_open(path / plain_name(chunk["file"]), framework="numpy") as file:
            pieces.append((chunk["offsets"], file.get_tensor(key)))
    if len(pieces) == 1 and list(pieces[0][1].shape) == saved["shape"]:
        return pieces[0][1]
    if sum(piece.size for _, piece in pieces) != math.prod(saved["shape"]):
        raise ValueError(f"the pieces of {key} do not cover it")
    found = np.empty(saved["shape"], pieces[0][1].dtype)
    for offsets, piece in pieces:
        found[tuple(slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))] = piece
    return found
