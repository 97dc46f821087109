"""Generators of random numbers that a forward may draw from, and their states."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import torch
from torch import Tensor, nn


def generators_of(model: nn.Module, everywhere: bool) -> list[Any]:
    """Those that modules have as attributes, and all others that there are in Python."""
    numpy: Any = sys.modules.get("numpy")
    kinds = {random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState))}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    found = [value for value in attributes if isinstance(value, (torch.Generator, *kinds))]
    return found + [each for each in gc.get_objects() if type(each) in kinds] if everywhere else found


def states_of(generators: list[Any], torchs: bool) -> list[tuple[str, Any]]:
    """(whose, its state) of each."""
    python, array, tensor = global_states()
    found: list[tuple[str, Any]] = [("Python's random", python), ("numpy's random", repr(array))]
    if torchs:
        found.append(("torch's generator, past its operations", tensor.tolist()))
    for each in generators:
        if isinstance(each, random.Random):
            found.append(("Python's random", each.getstate()))
        elif not isinstance(each, torch.Generator):
            bits = each.bit_generator if hasattr(each, "bit_generator") else each._bit_generator
            found.append(("numpy's random", repr(bits.state)))
        elif torchs:
            found.append(("a torch.Generator", each.get_state().tolist()))
    return found


def global_states() -> tuple[Any, Any, Tensor]:
    """Of Python, numpy and torch."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


def put_back(states: tuple[Any, Any, Tensor]) -> None:
    """As they were."""
    python, array, tensor = states
    random.setstate(python)
    torch.set_rng_state(tensor)
    if array is not None:
        sys.modules["numpy"].random.set_state(array)
