"""A look at the user's model leaves no trace: what a run on an example changes is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.original.settings import CONTAINERS, DEPTH, OWN
from penstock.model.random_states import generators_of, global_states, put_back, states_of


class OutsideChanges:
    """Random numbers from Python's and numpy's generators: these cannot be the same on every stage."""

    def __init__(self, model: nn.Module) -> None:
        self._generators = generators_of(model, everywhere=False)
        self.rest()

    def _state(self) -> Any:
        return states_of(self._generators, torchs=False)

    def rest(self) -> None:
        """Take note of the states after a unit, which may have drawn: it runs in one place only."""
        self._known = self._state()

    def check(self) -> None:
        if self._state() != self._known:
            raise ModelError(
                "the model's code between its units draws random numbers from Python's random or numpy, which every "
                "stage would draw anew; draw with torch, or switch that off (layerdrop=0, mask_time_prob=0)"
            )


@contextmanager
def patched(
    modules: dict[str, nn.Module], names: list[str], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap pieces' forwards while an example runs; the user's model is as before afterwards."""
    before = {name: modules[name].__dict__.get("forward") for name in names}
    try:
        for name in names:
            modules[name].__dict__["forward"] = wrap(name, modules[name].forward)
        yield
    finally:
        for name in names:
            if before[name] is None:
                modules[name].__dict__.pop("forward", None)
            else:
                modules[name].__dict__["forward"] = before[name]


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Put buffers, attributes and the random generators back as they were."""
    holders = list(model.modules())
    attributes = [dict(holder.__dict__) for holder in holders]
    inside = [
        each
        for kept in attributes
        for name, value in kept.items()
        for each in ([value] if name in OWN and type(value) in CONTAINERS else _changeable(value, DEPTH))
    ]
    before = [(each, contents_of(each)) for each in {id(each): each for each in inside}.values()]
    states = global_states()
    scripted = []  # Tables of scripted modules are not Python's.
    for holder in holders:
        for name, value in list(holder._buffers.items()):
            holder._buffers[name] = None if value is None else value.detach().clone()
            if isinstance(holder, torch.jit.ScriptModule):
                scripted.append((holder, name, value))
    try:
        yield
    finally:
        for holder, kept in zip(holders, attributes, strict=True):
            holder.__dict__.clear()
            holder.__dict__.update(kept)
        for each, contents in before:
            refill(each, contents)
        for holder, name, value in scripted:
            holder._buffers[name] = value
        put_back(states)


def _changeable(value: Any, depth: int) -> Iterator[Any]:
    """Yield what in an attribute's value could be changed in place, itself included."""
    if isinstance(value, Tensor):
        if not (isinstance(value, nn.Parameter) or value.requires_grad or value.is_meta or value.is_inference()):
            yield value
    elif isinstance(value, torch.Generator):
        yield value
    elif depth and (type(value) in CONTAINERS or isinstance(value, list)):
        if type(value) is not tuple:
            yield value
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _changeable(each, depth - 1)


def contents_of(value: Any) -> Any:
    """Return what is in something that can be changed in place, for `refill`; of a dict, pairs."""
    if isinstance(value, Tensor):
        return value._version, value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return list(value.items()) if isinstance(value, dict) else list(value)


def refill(value: Any, contents: Any) -> None:
    if isinstance(value, Tensor):
        version, copy = contents
        if value._version != version:
            with torch.no_grad():
                value.copy_(copy)
    elif isinstance(value, torch.Generator):
        value.set_state(contents)
    elif isinstance(value, list):
        value[:] = contents
    else:
        value.clear()
        if isinstance(value, dict):
            for key, item in contents:
                value[key] = item
        else:
            (value.update if isinstance(value, set) else value.extend)(contents)
