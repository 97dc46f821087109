"""One capture of a model: its operations on inputs like these, as a graph.

`torch.export` runs the forward on fake tensors and notes the operations below Python but above autograd: `linear`,
`dropout` and `batch_norm` stay whole and work in place as they do in the model, so that the graph gives the same bits,
draws the same random numbers and writes the same buffers. Sizes are captured as unknowns where that works. A capture
holds for the mode, the plain values and the sizes that it has checked (`misfit`); other inputs need another one.

torch.export is only given, and only returns, flat lists of tensors; the rest of the structure (dicts, dataclasses,
None, numbers, text) is kept in a `Template`, outside the graph.
"""

from __future__ import annotations

import enum
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from penstock.errors import ModelError
from penstock.model.export.effects import Effects, RandomDraws, RunningModule, nothing_lost
from penstock.model.replay.recording.unit_calls import Structure, flatten, unflatten

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
        """Return a key that is equal for the same structure with the same plain values."""
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
    """Rebuild the structure with these values in the places of the tensors."""
    leaves = [values[leaf.number] if isinstance(leaf, _GraphValue) else leaf for leaf in template.leaves]
    return unflatten(leaves, template.structure)


def fresh(tensor: Tensor) -> Tensor:
    """Copy a tensor: a forward may write to it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _as_contiguous(tensor: Any) -> Any:
    """Make of a slice of something larger a tensor of its own: export would capture sizes and strides of the whole."""
    if not isinstance(tensor, Tensor) or tensor.is_contiguous() or is_channels_last(tensor):
        return tensor
    return tensor.contiguous()


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether these are images with channels last in memory; where both orders are the same, they are not."""
    images = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return images and not tensor.is_contiguous()


@dataclass(frozen=True)
class Inputs:
    """What a model is called with."""

    template: Template  # Everything by name but for the tensors, also what was left out.
    tensors: list[Any]
    form: tuple[tuple[str, ...], tuple[str, ...]]  # Names that stand by position, and by keyword.


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

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Take the arguments of a call apart."""
        tensors: list[Any] = []
        template = take_apart(self._named(args, kwargs), "input", tensors)
        names = self._order[: len(args)] if self._by_name else ["*"]
        return Inputs(template, [*map(_as_contiguous, tensors)], (tuple(names), tuple({**self._fixed, **kwargs})))

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, sorted, those that were left out with their defaults."""
        given: dict[str, Any] = {**self._defaults, **self._fixed}
        if self._by_name:
            if len(args) > len(self._order):
                raise ModelError(f"the model takes {len(self._order)} positional inputs, but {len(args)} were given")
            given.update(zip(self._order, args, strict=False))
        else:
            given["*"] = tuple(args)
        return dict(sorted({**given, **kwargs}.items()))

    def call(self, model: nn.Module, inputs: Inputs, tensors: Sequence[Any]) -> Any:
        """Call a model with these tensors in the places of those of the inputs."""
        named, (by_place, by_keyword) = put_together(inputs.template, tensors), inputs.form
        args = tuple(named[name] for name in by_place) if self._by_name else named["*"]
        return model(*args, **{name: named[name] for name in by_keyword})


PREFIX = "model."  # Begins all names, because the model stands inside a _Flat.
REMEDY = "pass a list of stage modules instead"


class _Flat(nn.Module):
    """The model with tensors in and tensors out."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *tensors: Tensor) -> list[Any]:
        found: list[Any] = self._call(self.model, tensors)
        return found


class Capture:
    """The graph, and what stands at its placeholders and outputs."""

    def __init__(self, program: ExportedProgram, key: Any, output: Template, channels_last: list[bool]) -> None:
        self.key = key
        self.output = output
        self._channels_last = channels_last
        self.graph_module = program.graph_module
        self.nodes: list[Node] = [node for node in program.graph.nodes if node.op in ("call_function", "get_attr")]
        self.results: list[Any] = list(next(n for n in program.graph.nodes if n.op == "output").args[0])
        self.parameters: dict[Node, str] = {}
        self.buffers: dict[Node, str] = {}
        self.constants: dict[Node, Any] = {}
        self.constant_names: dict[Node, str] = {}
        self.inputs: dict[Node, int] = {}
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        for spec in program.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                self.inputs[node] = len(self.inputs)
            elif spec.kind is InputKind.PARAMETER:
                self.parameters[node] = str(spec.target).removeprefix(PREFIX)
            elif spec.kind is InputKind.BUFFER:
                self.buffers[node] = str(spec.target).removeprefix(PREFIX)
            else:
                self.constants[node] = program.constants[str(spec.target)]
                self.constant_names[node] = str(spec.target).removeprefix(PREFIX)
        self._guards: list[str] = list(program._guards_code)
        self._ranges = program.range_constraints

    @property
    def is_dynamic(self) -> bool:
        return any(not isinstance(size, int) for node in self.inputs for size in node.meta["val"].shape)

    def misfit(self, tensors: Sequence[Any]) -> str | None:
        """Return why these inputs cannot go through this graph, or None."""
        sizes: dict[Any, int] = {}
        for node, number in self.inputs.items():
            like, tensor = node.meta["val"], tensors[number]
            if tensor.dtype != like.dtype or tensor.dim() != like.dim():
                return f"shape {tuple(tensor.shape)}, {tensor.dtype} where {_shown(like)}, {like.dtype} was captured"
            if is_channels_last(tensor) != self._channels_last[number]:
                return "another memory format"
            for due, size in zip(like.shape, tensor.shape, strict=True):
                if isinstance(due, int):
                    if due != size:
                        return f"shape {tuple(tensor.shape)} where {_shown(like)} was captured"
                elif sizes.setdefault(due.node.expr, size) != size:
                    return f"sizes {sizes[due.node.expr]} and {size}, which were equal in the capture"
        return self._outside(sizes) or self._guarded(tensors)

    def _outside(self, sizes: dict[Any, int]) -> str | None:
        for expression, size in sizes.items():
            allowed = self._ranges.get(expression)
            if allowed is not None and not allowed.lower <= size <= allowed.upper:
                # a captured size is taken to be neither 0 nor 1, and torch's own guards do not say so
                return f"a size of {size}, where the capture holds for {allowed.lower} to {allowed.upper}"
            known = {symbol: sizes[symbol] for symbol in expression.free_symbols if symbol in sizes}
            if len(known) == len(expression.free_symbols) and expression.subs(known) != size:
                return f"a size of {size} where {expression} = {expression.subs(known)} was captured"
        return None

    def _guarded(self, tensors: Sequence[Any]) -> str | None:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # loads sympy

        names = {**SYMPY_INTERP, "math": math, "inf": math.inf, "torch": torch, "L": {"tensors": tensors}}
        return next((f"sizes that break {guard}" for guard in self._guards if not eval(guard, names)), None)


def _shown(like: Tensor) -> str:
    return str(tuple(size if isinstance(size, int) else str(size) for size in like.shape))


def capture(model: nn.Module, arguments: Arguments, inputs: Inputs) -> Capture:
    draws = RandomDraws(model, capture=True)

    def run() -> Capture:
        with draws.watched():
            return _captured(model, arguments, inputs)

    return draws.never(run)


def _captured(model: nn.Module, arguments: Arguments, inputs: Inputs) -> Capture:
    effects = Effects(model)
    made = _capture(model, arguments, inputs, effects)
    if effects.changed:
        made = _capture(model, arguments, inputs, effects)
    stale = [node for node, value in made.constants.items() if any(value is old for old in effects.before)]
    if stale:
        raise ModelError(
            f"the model's forward reads tensors that an earlier one left in it ({stale[0].name}) and replaces them; "
            f"a captured graph would always read the same ones. Make them registered buffers that change in place"
        )
    return made


def _capture(model: nn.Module, arguments: Arguments, inputs: Inputs, effects: Effects) -> Capture:
    tensors = [*map(fresh, inputs.tensors)]
    outputs: list[Template] = []
    where = RunningModule(model)

    def call(inner: nn.Module, given: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        with effects.undone(), effects.buffers_written():
            outputs.append(take_apart(arguments.call(inner, inputs, given), "output", found))
        return found

    # A size that stays unknown makes some models uncapturable; without unknowns they may still be
    flexible = tuple([Dim.AUTO if size > 1 else Dim.STATIC for size in tensor.shape] for tensor in tensors)
    try:
        try:
            program = _export(_Flat(model, call), tuple(tensors), {"tensors": flexible}, where, effects)
        except ModelError:
            raise
        except Exception:
            program = _export(_Flat(model, call), tuple(tensors), None, where, effects)
    except ModelError:
        raise
    except Exception as error:
        raise _refusal(model, where, error) from error
    return Capture(program, inputs.template.key(), outputs[-1], [*map(is_channels_last, tensors)])


def _export(
    flat: _Flat, tensors: tuple[Any, ...], shapes: Any, where: RunningModule, effects: Effects
) -> ExportedProgram:
    flat.training = flat.model.training
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.enable_grad())
        stack.enter_context(effects.restored())
        stack.enter_context(where.watched())
        stack.enter_context(nothing_lost(where))
        return torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)


def _refusal(model: nn.Module, where: RunningModule, error: Exception) -> ModelError:
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    line = str(error).partition("The following call raised this error:")[2].strip().split("\n\n")[0]
    place = " ".join(line.split())[:200]
    if "data-dependent" in str(error):
        return ModelError(
            f"torch.export cannot capture {type(model).__name__}: in {where} the control flow or a shape depends on "
            f"the values of a tensor ({reason}{f' {place}' if place else ''}). Choose with torch.where or torch.cond "
            f"there, or {REMEDY}"
        )
    return ModelError(
        f"torch.export cannot capture {type(model).__name__}, in {where}: {type(error).__name__}: {reason}. Change "
        f"that operation, or {REMEDY}"
    )
