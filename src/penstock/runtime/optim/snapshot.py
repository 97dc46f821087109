"""What an optimizer's step changes, kept so that the step can be taken back.

An update that is made before all is known may turn out wrong. Then parameters, the state, options and attributes of the
optimizer, the gradients (some kernels of torch write to them) and the scheduler are put back, and the right update is
made from exactly what there was, with the random numbers that the wrong one drew. The copies are kept from one step to
the next, so that after the first one a snapshot allocates nothing.

The user's code does not run between the update and the moment when it is taken back, but before it: while a step's
gradients wait for their update. Parameters that it writes to then, groups that it adds and momenta that it resets would
not be those that the gradients belong to: `WeightsSeen` finds them. Options that it sets (a learning rate) are for the
update that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.model import random_states
from penstock.runtime.loss.losses import fetch

_OPTIONS = "params"  # what is no option of a group
_OF_TORCH = {"defaults", "param_groups", "state", "step"}  # attributes that every optimizer has
_PRIVATE_OF_TORCH = ("_optimizer_", "_warned_capturable", "_zero_grad_profile", "_opt_called", "_step_supports_amp")
_NOT_OWN = ("torch", "builtins", "typing", "abc")  # packages of classes that count nothing
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, FunctionType, NoneType, Tensor)
_PLAIN = (Tensor, nn.Parameter)  # what has a place
# Steps of these write to no gradient, while those of a subclass may.
_LEAVING_GRADIENTS = (torch.optim.Adam, torch.optim.AdamW)
SMALL = 4096  # numbers that are copied sooner than multiplied
_Place = tuple[Any, str]  # what has an attribute, and its name


class UpdateSnapshot:
    """Everything that one optimizer, and the scheduler of its learning rates, change in a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # Maps the id of a tensor to the tensor and what it held.
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._states: list[tuple[Any, list[Any], Any]] = []  # key, leaves and structure of its state
        self._attributes: list[tuple[_Place, list[Any], Any]] = []  # the same of what the optimizer's class has added
        self._groups: list[dict[str, Any]] = []
        self._schedule: Any = None
        self._generators: Any = None

    @torch.no_grad()
    def take(self) -> None:
        """Remember what is there now."""
        optimizer, before = self._optimizer, self._copies
        self._copies = {}
        parameters = list(parameters_of(optimizer))
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._states = [(key, *_flat(state)) for key, state in optimizer.state.items()]
        self._attributes = [(place, *_flat(value)) for place, value in _added(optimizer)]
        held = (*self._states, *self._attributes)
        inside = (leaf for _, leaves, _ in held for leaf in leaves if isinstance(leaf, Tensor))
        written = () if type(optimizer) in _LEAVING_GRADIENTS else self._gradients
        gradients = (gradient for _, gradient in written if gradient is not None)
        options = (each for group in optimizer.param_groups for _, each in _options(group) if isinstance(each, Tensor))
        for tensor in (*parameters, *gradients, *inside, *options):
            self._keep(tensor, before)
        self._groups = [{name: _kept(option) for name, option in _options(group)} for group in optimizer.param_groups]
        self._schedule = None if self._scheduler is None else deepcopy(self._scheduler.state_dict())
        self._generators = random_states.global_states()

    def _keep(self, tensor: Tensor, before: dict[int, tuple[Tensor, Tensor]]) -> None:
        known = before.get(id(tensor))
        if (
            known is not None
            and known[0] is tensor
            and known[1].shape == tensor.shape
            and known[1].dtype == tensor.dtype
        ):
            self._copies[id(tensor)] = known[0], known[1].copy_(tensor)
        else:
            self._copies[id(tensor)] = tensor, tensor.detach().clone()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put all of it back; inside, random numbers are those that followed then, and no others are disturbed."""
        self.put_back()
        now = random_states.global_states()
        random_states.put_back(self._generators)
        try:
            yield
        finally:
            random_states.put_back(now)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it what it was."""
        for tensor, held in self._copies.values():
            tensor.copy_(held)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        state = self._optimizer.state
        state.clear()
        for key, leaves, spec in self._states:
            state[key] = pytree.tree_unflatten(list(leaves), spec)
        for (holder, name), _ in list(_added(self._optimizer)):
            delattr(holder, name)
        for (holder, name), leaves, spec in self._attributes:
            setattr(holder, name, pytree.tree_unflatten(list(leaves), spec))
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [name for name, _ in _options(group) if name not in options]:
                del group[name]
            group.update(options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)


class WeightsSeen:
    """What one optimizer's parameters and state are before the user's code runs: `changed` finds what that writes to.

    A parameter that is written to by its `data` keeps its version. So each row is multiplied by a vector of random
    numbers, which no change of sign or order leaves as it was, and which costs less than a norm: it is read once, by
    BLAS. Small parameters are copied, and all of it is joined, as many small operations would take longer than the
    reading.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._plain = [each for each in parameters_of(optimizer) if type(each) in _PLAIN]
        self._places = [(each._version, each.data_ptr()) for each in self._plain]
        self._joined, self._state = _join(self._plain), self._current_state()

    def changed(self) -> Tensor | str | None:
        """Return a parameter that was written to or given a gradient since; or words for what else was changed."""
        for parameter, (version, place) in zip(self._plain, self._places, strict=True):
            if parameter._version != version or parameter.data_ptr() != place or parameter.grad is not None:
                return parameter
        if self._current_state() != self._state:
            return "the state of the optimizer, or a parameter group,"
        joined = list(zip(self._joined, _join(self._plain), strict=True))
        alike = [torch.eq(before, now).all() for (*_, before), (*_, now) in joined]
        numbers = fetch(alike)
        for ((parameters, sizes, before), (*_, now)), same in zip(joined, alike, strict=True):
            if not numbers[id(same)]:  # Both have NaN in the same places, or it differs.
                parts = zip(parameters, torch.split(before, sizes), torch.split(now, sizes), strict=True)
                for parameter, one, other in parts:
                    if not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
                        return parameter
        return None

    def _current_state(self) -> dict[Any, Any]:
        """Return what the state and the groups consist of: numbers, and identities of objects (tensors: versions)."""
        state = {
            (id(key), name): (id(value), value._version)
            if isinstance(value, Tensor)
            else (value if isinstance(value, int | float) else id(value))
            for key, own in self._optimizer.state.items()
            if isinstance(own, dict)
            for name, value in own.items()
        }
        groups = {number: [*map(id, group["params"])] for number, group in enumerate(self._optimizer.param_groups)}
        return {**state, **groups}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def has_all(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a snapshot of an optimizer has everything that its step may change.

    A user's hooks may change anything, and so may an optimizer of a class of its own that holds other objects, such as
    an optimizer inside.
    """
    leaves = (leaf for _, value in _added(optimizer) for leaf in pytree.tree_leaves(value))
    return not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks) and all(
        isinstance(leaf, _VALUES) for leaf in leaves
    )


def _added(optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Place, Any]]:
    """Yield the attributes that torch's own classes lack: of the optimizer, in its slots, and of its classes."""
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and not name.startswith(_PRIVATE_OF_TORCH):
            yield (optimizer, name), value
    for own in (each for each in type(optimizer).__mro__ if each.__module__.partition(".")[0] not in _NOT_OWN):
        for name, value in vars(own).items():
            if isinstance(value, MemberDescriptorType):
                if hasattr(optimizer, name):
                    yield (optimizer, name), getattr(optimizer, name)
            elif not name.startswith(("__", "_abc_")) and not hasattr(value, "__get__"):  # methods and properties
                yield (own, name), value


@torch.no_grad()
def _join(parameters: Iterable[Tensor]) -> list[tuple[list[Tensor], list[int], Tensor]]:
    """Return what shows changes of parameters, joined for each device and dtype, with the lengths of their parts."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in parameters:
        part = _product(parameter)
        found, parts = groups.setdefault((part.device, part.dtype), ([], []))
        found.append(parameter)
        parts.append(part)
    return [(found, [each.numel() for each in parts], torch.cat(parts)) for found, parts in groups.values()]


def _product(parameter: Tensor) -> Tensor:
    """Return each row of a parameter times random numbers, or all that a small one holds, or one of a single row.

    One with fewer than 32 bits is taken in float32: rounded to 8 bits, a product shows no small change.
    """
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    values = values if values.itemsize >= 4 and values.is_floating_point() else values.float()
    if values.dim() < 2 or values.numel() <= SMALL:
        return values.flatten()
    rows = values.flatten(1)
    return torch.mv(rows, _random(rows.shape[1], rows.dtype, rows.device))


@lru_cache(maxsize=64)
def _random(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(0), device="cpu").to(device)


def _flat(value: Any) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(value)
    return [_kept(leaf) for leaf in leaves], spec


def _options(group: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((name, option) for name, option in group.items() if name != _OPTIONS)


def _kept(value: Any) -> Any:
    """Keep a tensor as the object that it is; its numbers are copied elsewhere."""
    return value if isinstance(value, Tensor) else deepcopy(value)
