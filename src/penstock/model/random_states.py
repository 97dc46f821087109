"""Generators of random numbers that a forward may draw from, and their states."""

from __future__ import annotations

import gc
import random
import sys
import threading
from typing import Any

import torch
from torch import Generator, Tensor, nn

from penstock.devices import CPU, generator_of, generators

TorchState = tuple[Tensor, list[Tensor]]  # The state of the CPU, and of every device of the accelerator.
_ONE_AT_A_TIME = threading.RLock()  # threads that ask torch for the state of a generator, or set it


class _Held(threading.local):
    """What the code on a thread has of the generators, where several threads take turns on them."""

    def __init__(self) -> None:
        # By device, those it has: alone, or (quietly) beside others that draw nothing either.
        self.quietly: dict[torch.device, bool] = {}


HELD = _Held()


def torch_state(generator: Generator = torch.default_generator) -> Tensor:
    """Return a generator's state, in code that other threads may run at the same moment.

    torch holds a lock of its own while it makes the tensor. That may collect garbage, and so run any Python code, which
    lets another thread go on. If that one asks for the state too, it waits for torch's lock without letting go of
    Python's, and neither ever ends. Here it waits for one of Python's own locks instead.
    """
    with _ONE_AT_A_TIME:
        return generator.get_state()


def set_torch_state(state: Tensor, generator: Generator = torch.default_generator) -> None:
    with _ONE_AT_A_TIME:
        generator.set_state(state)


def seed_torch(seed: int, generator: Generator = torch.default_generator) -> None:
    with _ONE_AT_A_TIME:
        generator.manual_seed(seed)


def generators_of(model: nn.Module, everywhere: bool) -> list[Any]:
    """Return the random generators that modules have as attributes; with `everywhere`, all others that there are in
    Python.
    """
    numpy: Any = sys.modules.get("numpy")
    kinds = {random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState))}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    found = [value for value in attributes if isinstance(value, (torch.Generator, *kinds))]
    return found + [each for each in gc.get_objects() if type(each) in kinds] if everywhere else found


def states_of(generators: list[Any], torchs: bool) -> list[tuple[str, Any]]:
    """Return the state of each generator, with a name for it."""
    (python, array), (tensor, _) = host_states(), random_state()
    found: list[tuple[str, Any]] = [("Python's random", python), ("numpy's random", _comparable(array))]
    if torchs:
        found.append(("torch's generator, past its operations", _comparable(tensor.numpy())))
    for each in generators:
        if isinstance(each, random.Random):
            found.append(("Python's random", each.getstate()))
        elif not isinstance(each, torch.Generator):
            bits = each.bit_generator if hasattr(each, "bit_generator") else each._bit_generator
            found.append(("numpy's random", _comparable(bits.state)))
        elif torchs:
            found.append(("a torch.Generator", _comparable(each.get_state().numpy())))
    return found


def _comparable(state: Any) -> Any:
    """Return a state with bytes for its arrays: these do not compare as one value, and their `repr` takes long."""
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def host_states() -> tuple[Any, Any]:
    """Return the states of the global generators of Python and numpy."""
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def put_back_host(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def global_states() -> tuple[Any, Any, TorchState]:
    """Return the states of the global generators of Python, numpy and torch."""
    return *host_states(), random_state()


def put_back(states: tuple[Any, Any, TorchState]) -> None:
    put_back_host(states[:2])
    restore_random(states[2])


def _in_use() -> list[Generator]:
    """Return the generators of devices that the code on this thread may draw from; those of other ranks are not."""
    return [generator_of(device) for device in HELD.quietly if device != CPU] if HELD.quietly else generators()


def random_state() -> TorchState:
    """Return the states of torch's generators, on the CPU and on every device that this thread may draw on."""
    return torch_state(), [torch_state(each) for each in _in_use()]


def restore_random(state: TorchState) -> None:
    set_torch_state(state[0])
    for generator, known in zip(_in_use(), state[1], strict=True):
        set_torch_state(known, generator)
