"""What a model asks of the devices, layer by layer, counted while it runs on tensors without memory.

The model runs forward and backward under torch's fake tensors (`fake_model` builds it): every operation is seen and
none is computed. It is run on one row and on two, which tells what grows with the rows of a microbatch (products,
activations) from what does not (gradients that are added up); on two and three where it takes no single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.parallel.tensor_parallel.tensor_plan import TensorPlan
from penstock.planner.cluster import Software
from penstock.planner.counting import Amount, OperationCounter, OperationCounts, key_of, on_line
from penstock.tools.train.run.baseline import code_of

PENSTOCK = Software()


@dataclass(frozen=True)
class Unit:
    """One piece of a model that is never cut apart: figures of one microbatch, forward and backward."""

    name: str  # The module that it begins with.
    forward: OperationCounts
    backward: OperationCounts
    saved: Amount  # Bytes that a forward leaves for the backward, its own output included.
    rise: Amount  # The most bytes that a forward adds while it runs.
    fall: Amount  # The most bytes that a backward adds to what there was when it began; gradients are not counted.
    output: float  # Bytes that go on to the next unit.
    parameters: Amount  # Numbers, and not bytes.
    trained: Amount


@dataclass(frozen=True)
class Profile:
    """A model as a chain of units."""

    one: tuple[Unit, ...]  # Figures of a microbatch of one row.
    two: tuple[Unit, ...]  # Figures of a microbatch of two rows.
    sequence: int
    element: int  # Bytes of a parameter.
    by_position: bool  # It is cut by counts of units, and not by their names.
    attention: int = 0  # Heads, which tensor parallelism divides.
    keys_share: float = 1.0  # Key and value heads, as a share of all.
    code: tuple[str, ...] = ()  # Modules of libraries that its layers are from.
    least_rows: int = 1  # Rows that a microbatch must have.
    undivided: str = ""  # Why tensor parallelism cannot divide it.

    @property
    def parameters(self) -> float:
        """Numbers in all parameters."""
        return sum(unit.parameters.at(1) for unit in self.one)

    @property
    def model_flops(self) -> float:
        """Floating-point operations of one row as MFU counts them: all of attention, nothing recomputed."""
        return 3 * sum(unit.forward.flops.at(1) + unit.forward.spared for unit in self.one)

    def counts_of(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Count the modules of each stage, if stages 1, 2, ... begin with the units `cuts`."""
        return tuple(
            sum(bool(unit.name) for unit in self.one[begin:end]) for begin, end in pairwise([0, *cuts, len(self.one)])
        )

    def cuts_of(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the units that stages 1, 2, ... begin with, if each has so many modules."""
        named = [number for number, unit in enumerate(self.one) if unit.name]
        return tuple(named[total] for total in accumulate(counts[:-1]))

    def names_of(self, cuts: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the modules that the units `cuts` begin with."""
        return tuple(self.one[cut].name for cut in cuts)

    def units(self, rows: float) -> tuple[Unit, ...]:
        """Return figures of a microbatch of so many rows; context parallelism leaves a part of a row to a rank."""
        if rows not in self._by_rows:
            self._by_rows[rows] = self._units(rows)
        return self._by_rows[rows]

    @cached_property
    def _by_rows(self) -> dict[float, tuple[Unit, ...]]:
        return {}

    def notes(self, of: object) -> dict[Any, Any]:
        """Return where to note figures that follow from this profile and `of`, so that they are found once."""
        return self._notes.setdefault(of, {})

    @cached_property
    def _notes(self) -> dict[object, dict[Any, Any]]:
        return {}

    def _units(self, rows: float) -> tuple[Unit, ...]:
        known: dict[tuple[int, int], Unit] = {}  # Layers that repeat are one object.
        for one, two in zip(self.one, self.two, strict=True):
            if (id(one.forward), id(two.forward)) not in known:
                known[id(one.forward), id(two.forward)] = on_line(one, two, rows)
        return tuple(
            replace(
                known[id(one.forward), id(two.forward)], name=one.name, parameters=one.parameters, trained=one.trained
            )
            for one, two in zip(self.one, self.two, strict=True)
        )


def profile_model(
    model: nn.Module,
    train: Callable[[int], Any],
    *,
    plan: TensorPlan | None = None,
    software: Software = PENSTOCK,
    half: torch.dtype | None = None,
    sequence: int = 1,
) -> Profile:
    """Count a model that was built under fake tensors; `train` runs so many rows and returns the loss."""
    names, listed = _unit_names(model)
    styles = _styles(model, plan, software)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # Gradients are then added, as in most steps.

    def counted(rows: int) -> tuple[Unit, ...]:
        return tuple(_counted(model, train, rows, names, styles, software, half))

    least = 1
    try:
        one, two = counted(1), counted(2)
    except (RuntimeError, ValueError):  # A batch norm takes more than one; what fails for any rows fails again.
        two, three, least = counted(2), counted(3), 2
        one = tuple(on_line(low, high, 0) for low, high in zip(two, three, strict=True))
    shape = getattr(model, "config", None)
    heads = getattr(shape, "num_attention_heads", 0)
    return Profile(
        one,
        two,
        sequence,
        max((each.element_size() for each in model.parameters()), default=4),
        listed,
        heads or _heads(model),
        (getattr(shape, "num_key_value_heads", None) or heads) / heads if heads else 1.0,
        tuple(code_of(model.modules())),
        least,
    )


def _counted(
    model: nn.Module,
    train: Callable[[int], Any],
    rows: int,
    names: list[str],
    styles: dict[int, str],
    software: Software,
    half: torch.dtype | None,
) -> Iterator[Unit]:
    """Run one microbatch and count."""
    trained = {key_of(each): each.requires_grad for each in model.parameters()}
    counter = OperationCounter(trained, styles, shares=software.name != "penstock")
    hooks = _UnitHooks(model, names, counter)
    with ExitStack() as stack:
        if not software.fused_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_half_scores())
        stack.enter_context(torch.autocast("cpu", dtype=half) if half is not None else nullcontext())
        stack.enter_context(hooks.hooked())
        stack.enter_context(counter)
        loss = next((each for each in pytree.tree_leaves(train(rows)) if getattr(each, "requires_grad", False)), None)
        if loss is None:
            raise ModelError(f"{type(model).__name__} returns no tensor with a gradient; a plan is for training")
        hooks.turn()
        loss.sum().backward()
        hooks.end()
    yield from _units(hooks, model, names, styles)


@contextmanager
def _half_scores() -> Iterator[None]:
    """Give attention that is no single kernel its scores in the type of what it is given."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def _heads(model: nn.Module) -> int:
    """Count the attention heads of a model that says so as the built-in GPT does; 0 where it does not."""
    found = [getattr(module, "heads", None) for module in model.modules()]
    return next((heads for heads in found if isinstance(heads, int)), 0)


class _UnitHooks:
    """Marks where units begin and end, forward and backward."""

    def __init__(self, model: nn.Module, names: list[str], counter: OperationCounter) -> None:
        self._modules = [model.get_submodule(name) for name in names]
        self._all = {id(module): name for name, module in model.named_modules() if name}
        self._counter = counter
        self.forward: list[OperationCounts] = []
        self.backward: dict[int, OperationCounts] = {}
        self.outputs: list[float] = []
        self.after = ""  # The first module that runs after the last unit.
        self._begun = -1  # The unit that runs backward.

    @contextmanager
    def hooked(self) -> Iterator[None]:
        first = self._modules[0]
        handles = [module.register_forward_hook(self._leave) for module in self._modules]
        handles.append(first.register_forward_pre_hook(self._enter, with_kwargs=True))
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(self._see))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, module: nn.Module, args: Any) -> None:
        if len(self.forward) == len(self._modules) + 1 and not self.after:
            self.after = self._all.get(id(module), "")

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.forward:
            self._begin(0, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._begin(len(self.forward), output)

    def _begin(self, number: int, values: Any) -> None:
        """Begin unit `number`: the one before has made `values`. What is before the first unit counts as one."""
        self.forward.append(self._counter.mark())
        tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
        self.outputs.append(float(sum(each.numel() * each.element_size() for each in tensors if each.dim() > 1)))
        for each in tensors:
            if each.requires_grad and each.is_floating_point():
                each.register_hook(lambda gradient, number=number: self._back(number))  # type: ignore[no-untyped-call]

    def turn(self) -> None:
        """End the forward."""
        self.forward.append(self._counter.mark())
        self.outputs.append(0.0)
        self._counter.backward = True
        self._begun = len(self.forward) - 1

    def _back(self, number: int) -> None:
        """Go back into unit `number`, as the gradient of what it made has come."""
        if number < self._begun:
            self.backward[self._begun] = self._counter.mark()
            self._begun = number

    def end(self) -> None:
        self.backward[self._begun] = self._counter.mark()


def _units(hooks: _UnitHooks, model: nn.Module, names: list[str], styles: dict[int, str]) -> Iterator[Unit]:
    """Yield what is before the units, the units, and what is after them."""
    owned = [dict(model.get_submodule(name).named_parameters()) for name in names]
    inside = {id(each) for part in owned for each in part.values()}
    rest = {name: each for name, each in model.named_parameters() if id(each) not in inside}
    early, late = _rest(model, names, rest)
    held = [early, *owned, late]
    live = Amount()
    parts = [name or type(model).__name__ for name in names]
    for number, (forward, name) in enumerate(zip(hooks.forward, ["", *parts, hooks.after], strict=True)):
        backward = hooks.backward.get(number, OperationCounts())
        before, live = live, forward.live
        start = (
            forward.live if number == len(hooks.forward) - 1 else hooks.backward.get(number + 1, OperationCounts()).live
        )
        every, learned = Amount(), Amount()
        for parameter in held[number].values():
            every.add(parameter.numel(), key_of(parameter) in styles)
            if parameter.requires_grad:
                learned.add(parameter.numel(), key_of(parameter) in styles)
        yield Unit(
            name,
            forward,
            backward,
            Amount(live.common - before.common, live.divided - before.divided),
            _above(forward, before),
            _above(backward, start),
            hooks.outputs[number],
            every,
            learned,
        )


def _above(part: OperationCounts, start: Amount) -> Amount:
    """Compute how far a part rose above what was alive at its start."""
    return Amount(max(0.0, part.peak - part.peak_divided - start.common), max(0.0, part.peak_divided - start.divided))


def _rest(model: nn.Module, names: list[str], rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide parameters outside of the units into those of modules before the first one, and the others."""
    order = [name for name, _ in model.named_modules()]
    first = order.index(names[0])
    early = {name: each for name, each in rest.items() if order.index(name.rpartition(".")[0]) < first}
    return early, {name: each for name, each in rest.items() if name not in early}


def _unit_names(model: nn.Module) -> tuple[list[str], bool]:
    """Name the modules that a model is cut between, or itself; and return whether it is a plain sequence of them."""
    if isinstance(model, nn.Sequential) and len(model) > 1:
        return [name for name, _ in model.named_children()], True
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    weights = {name: sum(each.numel() for each in module.parameters()) for name, module in lists}
    outer = [(name, module) for name, module in lists if len(module) > 1]
    if not outer:
        return [""], False
    name, module = max(outer, key=lambda each: (weights[each[0]], -len(each[0])))
    return [f"{name}.{child}" if name else child for child, _ in module.named_children()], False


def owners_of_parameters(model: nn.Module) -> list[str]:
    """Name the modules that a tensor plan's patterns are matched against."""
    return [name for name, module in model.named_modules() if name and any(True for _ in module.parameters(False))]


def _styles(model: nn.Module, plan: TensorPlan | None, software: Software) -> dict[int, str]:
    """Return how a plan divides parameters, by address."""
    if plan is None:
        return {}
    names = owners_of_parameters(model)
    found: dict[int, str] = {}
    kinds = {"colwise": "colwise", "colwise-gathered": "gathered", "rowwise": "rowwise", "embedding": "embedding"}
    for pattern, style in plan.styles.items():
        kind = kinds.get(style) if isinstance(style, str) else None
        if kind == "gathered" and software.name != "penstock":
            kind = "colwise"  # The loss is computed on parts.
        for name in names:
            if kind is not None and fnmatchcase(name, pattern):
                for parameter in model.get_submodule(name).parameters(False):
                    if parameter.dim() > 1 or kind == "colwise":
                        found[key_of(parameter)] = kind
    return found
