"""The random generators of this process, as plain values: torch's, CUDA's, Python's and numpy's if it is loaded."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["restore_generators", "states_of_generators"]


def states_of_generators() -> dict[str, Any]:
    """Where every generator stands now."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return found


def restore_generators(states: dict[str, Any]) -> None:
    """Put them back; CUDA's only where there are as many devices."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])  # not run here: no GPU
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        import numpy

        kind, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
