"""Two checkpoints compared, tensor by tensor, whatever their layouts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.load.reading import CheckpointContents, open_whole

SECTIONS = ("model.", "loss.", "average.", "optimizer.")
MISSING = object()


@dataclass(frozen=True)
class Change:
    """One tensor that differs: in `what` words, and by how much where both have it in one shape."""

    name: str
    what: str
    largest: float | None = None  # the largest absolute difference
    share: float | None = None  # Share of entries that differ.


@dataclass(frozen=True)
class Difference:
    """What differs, and how many tensors are the same to the bit."""

    steps: tuple[int, int]
    changes: list[Change]
    same: int
    config: list[str]

    def __bool__(self) -> bool:
        return bool(self.changes or self.config)


def compare(one: str | os.PathLike[str], other: str | os.PathLike[str], *, everything: bool = False) -> Difference:
    """Compare model and optimizer; with `everything`, also what processes keep for themselves, such as generators."""
    (first, left), (second, right) = open_whole(Path(one)), open_whole(Path(other))
    keys = [key for key in left.tensors | right.tensors if everything or key.startswith(SECTIONS)]
    changes = [change for key in keys if (change := _change(key, left, right)) is not None]
    config = _differing(first.config, second.config, "config")
    return Difference((first.step, second.step), changes, len(keys) - len(changes), config)


def _change(key: str, left: CheckpointContents, right: CheckpointContents) -> Change | None:
    ours, theirs = left.tensors.get(key), right.tensors.get(key)
    if ours is None or theirs is None:
        return Change(key, f"only in {right.path.name if ours is None else left.path.name}")
    if ours["shape"] != theirs["shape"]:
        return Change(key, f"shape {tuple(ours['shape'])} and {tuple(theirs['shape'])}")
    kinds = f"{ours['dtype']} and {theirs['dtype']}; " if ours["dtype"] != theirs["dtype"] else ""
    one, other = left.tensor(key), right.tensor(key)
    if not kinds and (torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other))):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = (one.to(wide) - other.to(wide)).abs()
    differs = (one != other) if not kinds else apart != 0
    share = differs.to(torch.float64).mean().item() if apart.numel() else 0.0
    largest = apart.max().item() if apart.numel() else 0.0
    return Change(key, f"{kinds}{100 * share:.3g} % of entries differ, at most by {largest:.3g}", largest, share)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, so that a NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8)


def _differing(one: Any, other: Any, place: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = {key: (one.get(key, MISSING), other.get(key, MISSING)) for key in one | other}
        return [line for key, pair in pairs.items() for line in _differing(*pair, f"{place}.{key}")]
    if one == other:
        return []
    shown = ["nothing" if value is MISSING else repr(value) for value in (one, other)]
    return [f"{place}: {' and '.join(shown)}"]
