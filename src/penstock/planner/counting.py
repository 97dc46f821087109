"""Counts what a model does and holds while it runs on tensors without memory: products, traffic and live bytes.

A dispatch mode sees every operation of forward and backward. It counts the floating-point operations of products, the
bytes that all other operations read and write, and the bytes of the tensors that are alive. Under a tensor plan it also
follows which tensors each rank of the axis has only a part of: what a divided layer makes is divided, and so is what is
made of that, until a rowwise layer adds the parts up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten: Any = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CONVOLUTION, CONVOLUTION_BACKWARD = aten.convolution.default, aten.convolution_backward.default
GROUPED = aten._grouped_mm.default  # The products of experts.
ALIKE = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)  # Products of tensors of one type.
LOOKUP = aten.embedding.default
CASTS = (aten._to_copy.default, aten.t.default, aten.detach.default, aten.view.default, aten.transpose.int)


@dataclass
class Amount:
    """A number of which tensor parallelism divides one part and leaves the other to every rank."""

    common: float = 0.0
    divided: float = 0.0

    def add(self, value: float, divided: bool) -> None:
        if divided:
            self.divided += value
        else:
            self.common += value

    def at(self, tp: int, everything: bool = False) -> float:
        """Return what one of `tp` ranks has of it; `everything`: also of what is not divided (along the sequence)."""
        return (self.common + self.divided) / tp if everything else self.common + self.divided / tp


@dataclass
class OperationCounts:
    """What was counted between two marks."""

    flops: Amount = field(default_factory=Amount)
    attention: Amount = field(default_factory=Amount)  # Those of attention that is one kernel.
    weight_flops: Amount = field(default_factory=Amount)  # Products with trained parameters, in a forward.
    traffic: Amount = field(default_factory=Amount)  # Bytes that products write, and others read and write.
    summed: float = 0.0  # Bytes of tensors that the ranks of a tensor-parallel axis add up.
    gathered: float = 0.0  # Bytes of those that they gather.
    collectives: int = 0
    shapes: tuple[tuple[float, float, float], ...] = ()  # By weight: flops of a row, dimensions divided and whole.
    deferred: Amount = field(default_factory=Amount)  # Bytes that a backward for weights needs, if it comes later.
    copies: Amount = field(default_factory=Amount)  # Bytes of parameters cast to another type.
    spared: float = 0.0  # Floating-point operations that causal attention leaves out.
    keys: float = 0.0  # Bytes of keys and values of attention.
    live: Amount = field(default_factory=Amount)  # Bytes alive at the end of it.
    peak: float = 0.0  # The most bytes alive, everything counted whole.
    peak_divided: float = 0.0  # How many of them were divided then.

    def thinness(self, tp: int) -> float:
        """Compute 1 / (smaller dimension of the weights that a rank multiplies with), on average over the products."""
        whole = sum(flops for flops, _, _ in self.shapes)
        return sum(flops / min(split / tp, other) for flops, split, other in self.shapes) / whole if whole else 0.0


class CannotCount(RuntimeError):
    """An operation that can run, and whose cost is not known; the message says what to plan instead."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside its `with` block; `mark` ends one part of it and begins the next.

    `styles` gives the parameters that a tensor plan divides, by the address of their memory: "colwise", "gathered",
    "rowwise" or "embedding". `shares`: layers that read one input share the sum of its gradient.
    """

    def __init__(self, trained: Mapping[int, bool], styles: Mapping[int, str], *, shares: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self._trained, self._styles, self._shares = dict(trained), dict(styles), shares
        self._shapes: set[tuple[int, ...]] = set()  # Divided weights whose gradient is made of whole tensors.
        self._alive: dict[int, tuple[float, bool]] = {}
        self._live = Amount()
        self._read: set[int] = set()  # Inputs of colwise layers.
        self._second: set[int] = set()  # Parameters of further layers that read one of them.
        self._deferred: set[int] = set()
        self.part = OperationCounts()

    def mark(self) -> OperationCounts:
        """Return what was counted since the last mark."""
        part, self.part = self.part, OperationCounts()
        part.live = Amount(self._live.common, self._live.divided)
        self.part.peak, self.part.peak_divided = self._live.common + self._live.divided, self._live.divided
        return part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        found = _grouped(*inputs) if func is GROUPED else func(*args, **kwargs)
        outputs = list(_tensors(found))
        if func.namespace == "aten" and outputs:
            _check_types(func, inputs, outputs)
            self.count(func, args, kwargs, found, inputs, outputs)
        return found

    def count(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Count an operation that has run."""
        before = [key_of(each) for each in inputs]
        known = [(each.dim(), key) for each, key in zip(inputs, before, strict=True) if key in self._trained]
        parameter = max(known)[1] if known else None  # A product has a matrix and perhaps a bias: the matrix counts.
        if parameter is not None and func in CASTS and len(inputs) == 1:
            self._inherit(outputs[0], parameter)
            return
        style = None if parameter is None else self._styles.get(parameter)
        divided = any(self._alive.get(key, (0, False))[1] for key in before)
        divided |= self.backward and tuple(outputs[0].shape) in self._shapes
        flops = _flops(func, inputs, args, kwargs, found)
        if flops is not None:
            self.part.flops.add(flops, divided or style is not None)
            if func is FLASH:
                self.part.spared += flops if len(args) > 4 and args[4] else 0.0
                self.part.keys += _bytes(inputs[1]) + _bytes(inputs[2])
            if parameter is not None:
                divided = self._product(func, parameter, style, flops, inputs, outputs[0], divided)
            if func in (FLASH, FLASH_BACKWARD):
                self.part.attention.add(flops, divided)
            else:  # Its results are written when it has ended.
                self.part.traffic.add(sum(map(_bytes, outputs)), divided)
        elif func is LOOKUP:
            size = _bytes(outputs[0])
            self.part.traffic.add(2 * size, False)
            if style is not None:
                self._see_shape(inputs[0])
                self._sum(outputs[0])
            divided = False
        elif not set(map(key_of, outputs)) <= set(before) or func._schema.is_mutable:
            for each, key in zip(inputs, before, strict=True):
                self.part.traffic.add(_bytes(each), self._alive.get(key, (0, False))[1] or key in self._styles)
            for each in outputs:
                self.part.traffic.add(_bytes(each), divided)
        for each in outputs:
            if key_of(each) not in before:  # Else it is a view, or a gradient that was added to.
                self._keep(each, divided)

    def _product(
        self,
        func: Any,
        parameter: int,
        style: str | None,
        flops: float,
        inputs: list[Tensor],
        output: Tensor,
        divided: bool,
    ) -> bool:
        """Count a product with a parameter; return whether its result is divided."""
        if not self.backward:
            other = next((each for each in inputs if key_of(each) not in self._trained), output)
            if style in ("colwise", "gathered"):
                if self._shares and key_of(other) in self._read:
                    self._second.add(parameter)
                self._read.add(key_of(other))
            weight = next(each for each in inputs if key_of(each) == parameter)
            out = float(output.shape[1 if func is CONVOLUTION else -1])
            inner = weight.numel() / out / (len(weight) if func is GROUPED else 1)
            divides = {None: (inf, min(out, inner)), "rowwise": (inner, out)}.get(style, (out, inner))
            self.part.shapes += ((flops, *divides),)
            if self._trained[parameter]:
                self.part.weight_flops.add(flops, style is not None)
                if key_of(other) not in self._deferred:
                    self._deferred.add(key_of(other))
                    self.part.deferred.add(_bytes(other), style == "rowwise")
                self.part.deferred.add(_bytes(output), style in ("colwise", "gathered"))
            if style == "rowwise":
                self._sum(output)
            elif style == "gathered":
                self._see_shape(weight)
                self.part.gathered += _bytes(output)
                self.part.collectives += 1
            return style == "colwise" or (divided and style is None)
        if style in ("colwise", "gathered"):
            if parameter not in self._second:
                self._sum(output)
            return False
        return style == "rowwise" or (divided and style is None)

    def _see_shape(self, weight: Tensor) -> None:
        self._shapes |= {tuple(weight.shape), tuple(weight.shape)[::-1]}

    def _sum(self, tensor: Tensor) -> None:
        self.part.summed += _bytes(tensor)
        self.part.collectives += 1

    def _inherit(self, copy: Tensor, parameter: int) -> None:
        """Let a cast or a view of a parameter stand for it; casts are kept for the whole step."""
        key = key_of(copy)
        if key not in self._trained:
            self._trained[key] = self._trained[parameter]
            if parameter in self._styles:
                self._styles[key] = self._styles[parameter]
            self.part.copies.add(_bytes(copy), parameter in self._styles)
            weakref.finalize(copy.untyped_storage(), self._end, key)

    def _keep(self, tensor: Tensor, divided: bool) -> None:
        key = key_of(tensor)
        if key in self._alive or key in self._trained:
            return
        storage = tensor.untyped_storage()
        size = float(storage.nbytes())
        self._alive[key] = size, divided
        self._live.add(size, divided)
        weakref.finalize(storage, self._end, key)
        total = self._live.common + self._live.divided
        if total > self.part.peak:
            self.part.peak, self.part.peak_divided = total, self._live.divided

    def _end(self, key: int) -> None:
        size, divided = self._alive.pop(key, (0.0, False))
        self._live.add(-size, divided)
        self._trained.pop(key, None)
        self._styles.pop(key, None)
        self._deferred.discard(key)
        self._read.discard(key)


def key_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from others' while it lives."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


def _tensors(values: Any) -> Iterator[Tensor]:
    return (each for each in pytree.tree_leaves(values) if isinstance(each, Tensor))


def _check_types(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Refuse what torch refuses only where there is memory, and tensors whose bytes are not known."""
    types = {each.dtype for each in inputs}
    if func.overloadpacket in ALIKE and len(types) > 1:
        raise TypeError(f"{func.overloadpacket} of {' and '.join(sorted(map(str, types)))}, which must be one type")
    if func.overloadpacket in ALIKE and outputs[0].is_complex():
        raise CannotCount(f"{func.overloadpacket} of complex numbers is not priced; plan a stand-in with real ones")
    if any(each.layout is not torch.strided for each in outputs):
        raise CannotCount("it has sparse gradients, whose size depends on the data; plan it with sparse=False")


def _grouped(rows: Tensor, weights: Tensor, *ends: Tensor) -> Tensor:
    """Make the result of a product of groups: without memory, torch has it for bfloat16 only."""
    if rows.dim() == weights.dim() == 2:  # This is the gradient of the weights, one matrix per group.
        return rows.new_empty(ends[0].shape[0], rows.shape[0], weights.shape[1])
    return rows.new_empty(*rows.shape[rows.dim() > weights.dim() : -1], weights.shape[-1])


def _flops(func: Any, inputs: list[Tensor], args: Any, kwargs: dict[str, Any], found: Any) -> float | None:
    """Count the operations of a product, None for what is no product; causal attention needs half of them."""
    for flash, formula, tensors, place in (
        (FLASH, sdpa_flop_count, 3, 4),
        (FLASH_BACKWARD, sdpa_backward_flop_count, 4, 7),
    ):
        if func is flash:
            causal = len(args) > place and args[place]
            return float(formula(*(each.shape for each in inputs[:tensors]))) / (2 if causal else 1)
    if (
        func is CONVOLUTION_BACKWARD
    ):  # Each gradient takes as many as the forward; torch's formula does not know groups.
        output, given, weight = (each.shape for each in inputs[:3])
        forward = conv_flop_count(given, weight, output, transposed=args[7])  # type: ignore[arg-type]
        return float(forward * sum(args[10][:2]))
    if func is GROUPED:
        rows, weights = inputs[:2]  # Each row meets the weights of one group.
        groups = len(rows) if rows.dim() > weights.dim() else 1
        return 2.0 * rows.numel() * weights.shape[-1] / groups
    counted = flop_registry.get(func.overloadpacket)
    return None if counted is None else float(counted(*args, **kwargs, out_val=found))


def on_line(one: Any, two: Any, rows: float) -> Any:
    """Extend a figure to `rows` rows, from those for one row and for two: what grows does so in proportion."""
    if isinstance(one, float) or (isinstance(one, int) and not isinstance(one, bool)):
        return max(0.0, one + (rows - 1) * (two - one))
    if not is_dataclass(one):
        return one
    return replace(
        one,  # type: ignore[type-var]
        **{each.name: on_line(getattr(one, each.name), getattr(two, each.name), rows) for each in fields(one)},
    )
