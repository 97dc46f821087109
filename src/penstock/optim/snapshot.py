"""What an optimizer's step changes, kept so that the step can be taken back.

An update that is made before all is known may turn out wrong. Then parameters, the optimizer's state and options, the
gradients (some of torch's own kernels write to them) and the scheduler are put back, and the right update is made from
exactly what there was, with the random numbers that the wrong one drew. The copies are kept from one step to the next,
so that after the first one a snapshot allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_OPTIONS = "params"  # what is no option of a group


class UpdateSnapshot:
    """Everything that one optimizer, and the scheduler of its learning rates, change in a step."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor, and what it held
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._states: list[tuple[Any, list[Any], Any]] = []  # key, leaves and structure of its state
        self._groups: list[dict[str, Any]] = []
        self._schedule: Any = None
        self._generator: Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Remember what is there now."""
        optimizer, before = self._optimizer, self._copies
        self._copies = {}
        parameters = list(parameters_of(optimizer))
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._states = []
        for key, state in optimizer.state.items():
            leaves, spec = pytree.tree_flatten(state)
            self._states.append((key, [_kept(leaf) for leaf in leaves], spec))
        inside = (leaf for _, leaves, _ in self._states for leaf in leaves if isinstance(leaf, Tensor))
        gradients = (gradient for _, gradient in self._gradients if gradient is not None)
        options = (each for group in optimizer.param_groups for _, each in _options(group) if isinstance(each, Tensor))
        for tensor in (*parameters, *gradients, *inside, *options):
            self._keep(tensor, before)
        self._groups = [{name: _kept(option) for name, option in _options(group)} for group in optimizer.param_groups]
        self._schedule = None if self._scheduler is None else deepcopy(self._scheduler.state_dict())
        self._generator = torch.get_rng_state()

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
        """All of it is what it was; and inside, random numbers are those that followed then. What is drawn outside is
        not disturbed by that.
        """
        self.put_back()
        with torch.random.fork_rng(devices=()):
            assert self._generator is not None
            torch.set_rng_state(self._generator)
            yield

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
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [name for name, _ in _options(group) if name not in options]:
                del group[name]
            group.update(options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _options(group: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((name, option) for name, option in group.items() if name != _OPTIONS)


def _kept(value: Any) -> Any:
    """A tensor stays the object that it is, and its numbers are copied elsewhere."""
    return value if isinstance(value, Tensor) else deepcopy(value)
