"""One capture of a model: its operations on inputs like these, as a graph.

`torch.export` runs the forward on fake tensors and notes the operations below Python but above
autograd: `linear`, `dropout` and `batch_norm` stay whole and work in place as they do in the
model, so that running the graph gives the same bits, draws the same random numbers and writes
the same buffers. Sizes are captured as unknowns where that works, else as they are. A capture
holds for the mode (training or not), the plain values and the sizes that it has checked: `fits`
asks. Other inputs need another capture.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from penstock.errors import ModelError
from penstock.model.export.containers import (
    Arguments,
    Template,
    as_contiguous,
    is_channels_last,
    put_together,
    take_apart,
)
from penstock.model.export.effects import Effects, RunningModule, nothing_lost
from penstock.model.export.nondeterminism import RandomDraws

PREFIX = "model."  # of all names, because the model stands inside a _Flat
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
        self.key = key  # of the plain arguments
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
        """Whether any size of the inputs may change."""
        return any(not isinstance(size, int) for node in self.inputs for size in node.meta["val"].shape)

    def misfit(self, tensors: Sequence[Any]) -> str | None:
        """Why these inputs cannot go through this graph, or None."""
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


def capture(model: nn.Module, arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
    """Capture the model as it is, in its present mode, on these inputs."""
    draws = RandomDraws(model, capture=True)

    def run() -> Capture:
        with draws.watched():
            return _captured(model, arguments, args, kwargs)

    return draws.never(run)


def _captured(model: nn.Module, arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
    effects = Effects(model)
    made = _capture(model, arguments, args, kwargs, effects)
    if effects.changed:
        made = _capture(model, arguments, args, kwargs, effects)
    stale = [node for node, value in made.constants.items() if any(value is old for old in effects.before)]
    if stale:
        raise ModelError(
            f"the model's forward reads tensors that an earlier one left in it ({stale[0].name}) and replaces them; "
            f"a captured graph would always read the same ones. Make them registered buffers that change in place"
        )
    return made


def _capture(
    model: nn.Module, arguments: Arguments, args: Sequence[Any], kwargs: Mapping[str, Any], effects: Effects
) -> Capture:
    tensors: list[Any] = []
    named = take_apart(arguments.named(args, kwargs), "input", tensors)
    # of its own memory: of a slice, torch.export would capture the strides and the sizes of the whole
    tensors = [as_contiguous(tensor).detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    form = arguments.form(args, kwargs)
    outputs: list[Template] = []
    where = RunningModule(model)

    def call(inner: nn.Module, given: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        with effects.undone(), effects.buffers_written():
            outputs.append(take_apart(arguments.call(inner, form, put_together(named, given)), "output", found))
        return found

    # a size that stays unknown makes some models uncapturable; without unknowns they may still be
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
    return Capture(program, named.key(), outputs[-1], [is_channels_last(tensor) for tensor in tensors])


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
