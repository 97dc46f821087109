"""A stage's own copy of the module tree, down to the units, with their calls intercepted.

Containers are copied one by one, shallowly: they hold no parameter, and the user's own model
must not change. A unit is copied shallowly too, so that the glue finds the class, attributes
and parameters that it expects, with a forward of ours in the place of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["stage_tree"]

Answer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def stage_tree(model: nn.Module, watched: set[str], answer: Answer) -> nn.Module:
    """The copy; `answer(name, forward, args, kwargs)` is asked at every call of a watched module."""
    return _copy("", model, watched, answer, {})


def _copy(name: str, module: nn.Module, watched: set[str], answer: Answer, made: dict[int, nn.Module]) -> nn.Module:
    known = made.get(id(module))
    if known is not None:
        return known
    twin = copy.copy(module)
    made[id(module)] = twin
    twin.__dict__["_modules"] = dict(module._modules)  # parameters and buffers are one with the original's
    if name in watched:
        forward = module.forward

        def asked(*args: Any, **kwargs: Any) -> Any:
            return answer(name, forward, args, kwargs)

        twin.__dict__["forward"] = asked
        return twin
    for child_name, child in module._modules.items():
        if child is not None:
            full = f"{name}.{child_name}" if name else child_name
            twin._modules[child_name] = _copy(full, child, watched, answer, made)
    return twin
