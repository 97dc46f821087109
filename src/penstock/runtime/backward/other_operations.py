"""Operations that are no products and yet matter to a split backward: embeddings, attention, gradients in a forward.

Each has a rule of its own; one that returns `None` says "run it as it is".
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.errors import ModelError
from penstock.runtime.backward.stage_parameters import PLAIN

if TYPE_CHECKING:
    from penstock.runtime.backward.products import DeferringMode


def _embedding(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) < 2 or not (mode.may_split(args[0]) and mode.can_wait(args[1])):
        return None
    return mode.cut((args[1],), func(*args, **kwargs))


def _attention(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nn.MultiheadAttention` hands itself to the mode as one function; its products are inside.

    The function asks first whether a mode wants it and would be handed back for ever; so the same code runs with that
    question answered by no, with the mode on for what it calls.
    """
    if any(isinstance(value, Tensor) and type(value) not in PLAIN for value in (*args, *kwargs.values())):
        return None  # a subclass of Tensor may want to be asked
    unasked = FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, func.__name__, func.__defaults__
    )
    with mode:
        return unasked(*args, **kwargs)


def _inner_gradient(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward that differentiates needs the parameters in its graph: such a stage is not taken apart."""
    count = len(mode.deferred.products) + len(mode.deferred.subgraphs)
    if count:
        raise ModelError(
            f"a stage's forward calls {func.__qualname__} after {count} of its operations were split into "
            f"input and weight gradients, and in earlier microbatches it did not; choose a schedule without W for it"
        )
    mode.parameters.differentiates = True


Rule: TypeAlias = Callable[["DeferringMode", Any, tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[Any, Rule] = {
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((torch.autograd.grad, Tensor.backward), _inner_gradient),
}
