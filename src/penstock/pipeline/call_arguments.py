"""What step() is given, looked at before anything runs: slips that would else be a TypeError in code of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import UsageError
from penstock.runtime.loss.losses import torch_reduction


def positional(function: Callable[..., Any] | None) -> list[str]:
    """The names of the places that arguments fill, in order; none where the function does not say."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def check_loss_fn(loss_fn: Any) -> None:
    """A loss function can be called with an output and a target."""
    if isinstance(loss_fn, type):
        raise UsageError(f"loss_fn is the class {loss_fn.__qualname__}; pass an instance: loss_fn={_name(loss_fn)}()")
    signature = _signature(loss_fn)
    if signature is None:
        return
    try:
        signature.bind_partial(None, None)
    except TypeError as error:
        raise UsageError(
            f"loss_fn is called as loss_fn(output, target, **loss_kwargs), but {_name(loss_fn)}{signature} cannot be "
            f"({error}); take both, even if the target is not used: lambda output, target: ..."
        ) from None


def check_loss_kwargs(loss_fn: Any, names: Sequence[str]) -> None:
    """A loss function gets all that it needs beside output and target, and nothing that it does not know."""
    signature = _signature(loss_fn)
    if signature is None:
        return
    try:
        signature.bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(
            f"loss_fn {_name(loss_fn)}{signature} is called with output, target and loss_kwargs="
            f"{{{', '.join(map(repr, names))}}}: {error}; pass what it needs by name in loss_kwargs={{...}}"
        ) from None


def check_reduce(reduce: Any, names: Sequence[str]) -> None:
    """A function for `predict(reduce=)` can be called with an output and what was passed for it."""
    if not callable(reduce):
        raise UsageError(f"reduce={reduce!r}: pass a function of (output, **reduce_kwargs)")
    signature = _signature(reduce)
    try:
        if signature is not None:
            signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(
            f"reduce {_name(reduce)}{signature} is called with an output and reduce_kwargs="
            f"{{{', '.join(map(repr, names))}}}: {error}"
        ) from None


def check_call(call: str, forward: Callable[..., Any], args: Sequence[Any], target: Any, loss_fn: Any) -> None:
    """Positional arguments are the model's inputs; one of torch's losses, where it is called, has a target."""
    signature = _signature(forward)
    parameters = [] if signature is None else list(signature.parameters.values())
    places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_any = signature is None or any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if len(args) == 1 and isinstance(args[0], Mapping) and places and places[0] in args[0]:
        raise UsageError(
            f"{call} was passed a dict with {places[0]!r} in it, which the model takes by that name; pass its items: "
            f"{call[:-1]}**batch)"
        )
    if len(args) > len(places) and not takes_any:
        remedy = "" if target is not None else f"; the target goes by name: {call[:-1]}x, target=y)"
        raise UsageError(
            f"{call} was passed {len(args)} positional arguments, but the model takes {len(places)} "
            f"({', '.join(places) or 'none'}){remedy}"
        )
    if target is None and torch_reduction(loss_fn, {}) is not None:
        raise UsageError(f"{call} was passed no target, but loss_fn {_name(loss_fn)} needs one: pass target=")
