"""The random generators of this process, as plain values: torch's, Python's, and numpy's if it is loaded."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from penstock.devices import accelerator, generators


def _numpy() -> Any:
    """Return numpy, if something has loaded it; else nobody can have drawn from it."""
    return sys.modules.get("numpy")


def seed_generators(seed: int) -> None:
    """Begin them all from one number, so that what is drawn on every process is the same on every process."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := _numpy():
        numpy.random.seed(seed % 2**32)


def states_of_generators() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "accelerator": [accelerator(), [each.get_state() for each in generators()]],
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if numpy := _numpy():
        found["numpy"] = _exchanged(numpy.random.get_state(legacy=False), numpy.ndarray, torch.from_numpy)
    return found


def check_states(states: dict[str, Any]) -> None:
    """Refuse states that no generator takes: they are given to generators that nobody uses."""
    torch.Generator().set_state(states["torch"])
    for state in _of_devices(states)[1]:
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            raise ValueError(f"the state of a device's generator is {str(state)[:40]}, not bytes")
    random.Random().setstate(_of_python(states))
    if "numpy" in states and (numpy := _numpy()):
        # A copy of the same kind takes the state first.
        copy.deepcopy(numpy.random.mtrand._rand).set_state(_of_numpy(states))


def restore_generators(states: dict[str, Any]) -> None:
    """Put them back; those of devices only where there are as many of the same kind."""
    torch.set_rng_state(states["torch"])
    kind, known = _of_devices(states)
    if kind == accelerator() and len(known) == len(generators()):
        for generator, state in zip(generators(), known, strict=True):
            generator.set_state(state)
    random.setstate(_of_python(states))
    if "numpy" in states and (numpy := _numpy()):
        numpy.random.set_state(_of_numpy(states))


def _of_devices(states: dict[str, Any]) -> tuple[str | None, list[Any]]:
    kind, known = states["accelerator"] if "accelerator" in states else ("cuda", states["cuda"])
    return kind, known


def _of_python(states: dict[str, Any]) -> tuple[Any, ...]:
    version, numbers, gauss = states["python"]
    return version, tuple(numbers.tolist()), gauss


def _of_numpy(states: dict[str, Any]) -> Any:
    return _exchanged(states["numpy"], torch.Tensor, torch.Tensor.numpy)


def _exchanged(state: Any, kind: type, other: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _exchanged(value, kind, other) for key, value in state.items()}
    return other(state) if isinstance(state, kind) else state
