"""Any nest of containers, as its tensors and a template of the rest; and back.

torch.export wants inputs and outputs of types that it knows. So it is only given and only
returns flat lists of tensors, and the rest of the structure (dicts, dataclasses, None, numbers,
text) is kept here, outside the graph.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.replay.recording.nested_values import Structure, flatten, unflatten

PLAIN = (str, bytes, int, float, complex, bool, type(None), enum.Enum, slice, range)
PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class _GraphValue:
    """Stands for a leaf that is a value of the graph, by its number."""

    number: int


@dataclass(frozen=True)
class Template:
    """A structure without its tensors."""

    structure: Structure
    leaves: tuple[Any, ...]

    def key(self) -> tuple[Any, ...]:
        """Equal keys: the same structure with the same plain values."""
        leaves = (leaf if isinstance(leaf, _GraphValue) else (type(leaf), repr(leaf)) for leaf in self.leaves)
        return (self.structure, *leaves)


def take_apart(value: Any, what: str, into: list[Any]) -> Template:
    """Put the tensors of `value` at the end of `into`; `what` names it in an error."""
    leaves, structure = flatten(value)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, (Tensor, *SYMBOLIC)):
            leaves[place] = _GraphValue(len(into))
            into.append(leaf)
        elif not isinstance(leaf, (*PLAIN, *PLAIN_TORCH)):
            raise ModelError(
                f"the model's {what} holds a {type(leaf).__module__}.{type(leaf).__qualname__}, in which a captured "
                f"graph cannot follow tensors; use tensors, plain values, lists, tuples, dicts and dataclasses, or "
                f"register the type with torch.utils._pytree.register_pytree_node"
            )
    return Template(structure, tuple(leaves))


def put_together(template: Template, values: Sequence[Any]) -> Any:
    """The structure again, with these values in the places of the tensors."""
    leaves = [values[leaf.number] if isinstance(leaf, _GraphValue) else leaf for leaf in template.leaves]
    return unflatten(leaves, template.structure)


def as_contiguous(tensor: Any) -> Any:
    """The tensor with strides that follow from its sizes: a slice of something larger becomes a tensor of its own."""
    if not isinstance(tensor, Tensor) or tensor.is_contiguous() or is_channels_last(tensor):
        return tensor
    return tensor.contiguous()


def is_channels_last(tensor: Tensor) -> bool:
    """Images with their channels last in memory; where both orders are the same, no."""
    images = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return images and not tensor.is_contiguous()


class Arguments:
    """How a model's forward takes its arguments, so that `f(x)`, `f(x=x)` and `f(x, mask=None)` are one form."""

    def __init__(self, model: nn.Module, fixed: Mapping[str, Any]) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        self._by_name = not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._order = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self._defaults = {p.name: p.default for p in parameters if p.kind in named and p.default is not p.empty}
        self._fixed = dict(fixed)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name, sorted, those that were left out with their defaults."""
        given: dict[str, Any] = {**self._defaults, **self._fixed}
        if self._by_name:
            if len(args) > len(self._order):
                raise ModelError(f"the model takes {len(self._order)} positional inputs, but {len(args)} were given")
            given.update(zip(self._order, args, strict=False))
        else:
            given["*"] = tuple(args)
        return dict(sorted({**given, **kwargs}.items()))

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names that stand by position and by keyword when the model is called as here."""
        names = self._order[: len(args)] if self._by_name else ["*"]
        return tuple(names), tuple({**self._fixed, **kwargs})

    def call(self, model: nn.Module, form: tuple[tuple[str, ...], tuple[str, ...]], named: Mapping[str, Any]) -> Any:
        by_place, by_keyword = form
        args = tuple(named[name] for name in by_place) if self._by_name else named["*"]
        return model(*args, **{name: named[name] for name in by_keyword})
