"""The parameters of one rank before a step: their gradients, what hooks wait for them, and whether they change.

Hooks that want complete gradients (`register_post_accumulate_grad_hook`: mostly an optimizer in the backward) are held
during a step, and run once for each parameter when the step has ended well. Before that a gradient is not complete:
more microbatches, other ranks' parts of tied weights, and replicas are still to be added. And what such a hook does,
such as an update, could not be undone if the step fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.runtime.state.ownership import version_of

Hooks = dict[int, Callable[[Tensor], object]]  # of one parameter, by number


class ParametersBefore:
    """The parameters of one rank as they were before a step."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []  # of the parameters
        self._gradients: list[tuple[Tensor, Tensor | None, int, Tensor | None]] = []  # with its version, and a copy
        self._hooks: list[tuple[Tensor, Hooks, Hooks]] = []  # parameter, its hooks as torch has them, those held

    def take(self, parameters: list[Tensor], gradients: bool, copied: bool) -> None:
        """Remember what the parameters have now."""
        self._parameters = parameters
        self._versions = [version_of(each) for each in parameters]
        self._gradients = [_gradient(each, copied) for each in parameters] if gradients else []

    def put_back(self) -> None:
        """Give the parameters the gradients that they had."""
        for parameter, gradient, version, copy in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if gradient is not None and copy is not None and version_of(gradient) != version:
                with torch.no_grad():
                    gradient.copy_(copy)

    def forget_gradients(self) -> None:
        """Let go of the copies, which may be large."""
        self._gradients = []

    def versions(self) -> list[tuple[Tensor, int]]:
        """Return the parameters, each with its version now."""
        return [(parameter, version_of(parameter)) for parameter in self._parameters]

    def have_hooks(self) -> bool:
        """Return whether any of the parameters has a hook that wants its complete gradient."""
        return bool(self._hooks) or any(parameter._post_accumulate_grad_hooks for parameter in self._parameters)

    def hold_hooks(self) -> None:
        """Take the hooks that want complete gradients away from their parameters."""
        for parameter in self._parameters:
            hooks: Hooks | None = parameter._post_accumulate_grad_hooks
            if hooks:
                self._hooks.append((parameter, hooks, dict(hooks)))
                hooks.clear()

    def release_hooks(self) -> list[Callable[[], object]]:
        """Give the hooks back, and return the calls that are due: of parameters that have got a gradient."""
        before = {id(parameter): then for parameter, *then in self._gradients}
        due: list[Callable[[], object]] = []
        for parameter, hooks, held in self._hooks:
            registered_since = dict(hooks)
            hooks.clear()
            hooks.update({**held, **registered_since})
            (gradient, version, _), now = before[id(parameter)], parameter.grad
            if now is not None and (now is not gradient or version_of(now) != version):
                due.extend(partial(hook, parameter) for hook in hooks.values())
        self._hooks = []
        return due

    def written(self) -> list[Tensor]:
        """Return the parameters that were written to since."""
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if version_of(parameter) != version]


def _gradient(parameter: Tensor, copied: bool) -> tuple[Tensor, Tensor | None, int, Tensor | None]:
    gradient = parameter.grad
    if gradient is None:
        return parameter, None, 0, None
    return parameter, gradient, version_of(gradient), gradient.detach().clone() if copied else None
