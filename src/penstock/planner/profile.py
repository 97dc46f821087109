"""What a model asks of the devices, layer by layer, found out on tensors without memory.

The model is built and run, forward and backward, under torch's fake tensors: every operation is seen and none is
computed, so a model of any size is profiled in a moment. Layers that repeat are built a few times only. It is run on
one row and on two, which tells what grows with the rows of a microbatch (products, activations) from what does not
(gradients that are added up).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.parallel.tensor_parallel.tensor_plan import TensorPlan, plan_of
from penstock.planner.cluster import Software
from penstock.planner.counting import Amount, OperationCounter, OperationCounts, key_of, on_line
from penstock.train.build import build_model, gpt_options
from penstock.train.config.settings import TrainConfig
from penstock.train.config.source import HUGGINGFACE, is_function
from penstock.train.data.batches import open_data
from penstock.train.loss import StepLoss, build_loss
from penstock.train.models.freeze import freeze
from penstock.train.models.huggingface import folder_of, tensor_plan_of

BUILT = 4  # of layers that repeat
IN_MEMORY = "a module in memory"  # the source of a model that no configuration can name
PENSTOCK = Software()
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Unit:
    """One piece of a model that is never cut apart: figures of one microbatch, forward and backward."""

    name: str  # the module that it begins with
    forward: OperationCounts
    backward: OperationCounts
    saved: Amount  # bytes that a forward leaves for the backward, its own output included
    rise: Amount  # the most bytes that a forward adds while it runs
    fall: Amount  # the most bytes that a backward adds to what there was when it began; gradients are not counted
    output: float  # bytes that go on to the next unit
    parameters: Amount  # numbers
    trained: Amount


@dataclass(frozen=True)
class Profile:
    """A model as a chain of units."""

    one: tuple[Unit, ...]  # for a microbatch of one row
    two: tuple[Unit, ...]  # and of two
    sequence: int
    element: int  # bytes of a parameter
    by_position: bool  # is it cut by counts of units, or by their names?
    attention: int = 0  # heads; tensor parallelism divides them
    keys_share: float = 1.0  # key and value heads, as a share of all

    @property
    def parameters(self) -> float:
        """Numbers in all parameters."""
        return sum(unit.parameters.at(1) for unit in self.one)

    @property
    def model_flops(self) -> float:
        """Floating-point operations of one row as MFU counts them: all of attention, nothing recomputed."""
        return 3 * sum(unit.forward.flops.at(1) + unit.forward.spared for unit in self.one)

    def units(self, rows: float) -> tuple[Unit, ...]:
        """Figures for a microbatch of so many rows; a part of a row is what context parallelism leaves to a rank."""
        if rows not in self._by_rows:
            self._by_rows[rows] = self._units(rows)
        return self._by_rows[rows]

    @cached_property
    def _by_rows(self) -> dict[float, tuple[Unit, ...]]:
        return {}

    def _units(self, rows: float) -> tuple[Unit, ...]:
        known: dict[tuple[int, int], Unit] = {}  # layers that repeat are one object
        for one, two in zip(self.one, self.two, strict=True):
            if (id(one.forward), id(two.forward)) not in known:
                known[id(one.forward), id(two.forward)] = on_line(one, two, rows)
        return tuple(
            replace(
                known[id(one.forward), id(two.forward)], name=one.name, parameters=one.parameters, trained=one.trained
            )
            for one, two in zip(self.one, self.two, strict=True)
        )


def profile_config(config: TrainConfig, software: Software) -> Profile:
    """The profile of what a configuration trains."""
    short, real = _shortened(config)
    half = HALVES.get(config.pipeline.precision)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model, own_loss = build_model(short)
        freeze(model, config.training.freeze)
        loss = build_loss(config, model, own_loss, True)
        if half is not None and software.master_weights:
            _cast(model, half)
            half = None

        def train(rows: int) -> Any:
            args, kwargs, target = _example(config, rows)
            output = model(*args, **kwargs)
            if loss is None:
                return output
            return loss(output, target, total=1.0) if isinstance(loss, StepLoss) else loss(output, target)

        plan = _tensor_plan(config, model)
        found = profile_model(model, train, plan=plan, software=software, half=half, sequence=config.data.sequence)
    return _lengthened(found, real)


def profile_module(
    model: nn.Module | Callable[[], nn.Module], example: Any, config: TrainConfig, software: Software
) -> Profile:
    """The profile of a module, or of what a function builds; rows are as `example` shows them."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    half = HALVES.get(config.pipeline.precision)
    with fake:
        built = _without_memory(model, fake) if isinstance(model, nn.Module) else model()
        if not isinstance(built, nn.Module):
            raise UsageError(f"plan(): the function returned a {type(built).__name__}; return an nn.Module")

        def train(rows: int) -> Any:
            given = pytree.tree_map(lambda each: _rows_like(each, rows), example)
            return built(**given) if isinstance(given, dict) else built(*given)

        return profile_model(built, train, software=software, half=half, sequence=config.data.sequence)


def _rows_like(value: Any, rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    return torch.zeros(rows, *value.shape[1:], dtype=value.dtype, requires_grad=False)


def _without_memory(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers have shapes only."""
    known: dict[int, Any] = {}
    for each in (*model.parameters(), *model.buffers()):
        shape = fake.from_tensor(each.detach())
        trained = each.requires_grad
        known[id(each)] = nn.Parameter(shape, trained) if isinstance(each, nn.Parameter) else shape
    return copy.deepcopy(model, known)


def profile_model(
    model: nn.Module,
    train: Callable[[int], Any],
    *,
    plan: TensorPlan | None = None,
    software: Software = PENSTOCK,
    half: torch.dtype | None = None,
    sequence: int = 1,
) -> Profile:
    """The profile of a model that was built under fake tensors; `train` runs so many rows and returns the loss."""
    names, listed = _unit_names(model)
    styles = _styles(model, plan, software)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # so that later gradients are added
    one, two = (tuple(_counted(model, train, rows, names, styles, software, half)) for rows in (1, 2))
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
    watch = _Watch(model, names, counter)
    with ExitStack() as stack:
        if not software.fused_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_half_scores())
        stack.enter_context(torch.autocast("cpu", dtype=half) if half is not None else nullcontext())
        stack.enter_context(watch.hooked())
        stack.enter_context(counter)
        loss = train(rows)
        loss = loss if isinstance(loss, Tensor) else next(iter(pytree.tree_leaves(loss)))
        watch.turn()
        loss.sum().backward()
        watch.end()
    yield from _units(watch, model, names, styles)


@contextmanager
def _half_scores() -> Iterator[None]:
    """Attention that is no single kernel has its scores in the type of what it is given."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers in another type; what is tied stays so."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = made.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                )
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _heads(model: nn.Module) -> int:
    """Attention heads of a model that says so as the built-in GPT does; 0 where it does not."""
    found = [getattr(module, "heads", None) for module in model.modules()]
    return next((heads for heads in found if isinstance(heads, int)), 0)


class _Watch:
    """Marks where units begin and end, forward and backward."""

    def __init__(self, model: nn.Module, names: list[str], counter: OperationCounter) -> None:
        self._modules = [model.get_submodule(name) for name in names]
        self._all = {id(module): name for name, module in model.named_modules() if name}
        self._counter = counter
        self.forward: list[OperationCounts] = []
        self.backward: dict[int, OperationCounts] = {}
        self.outputs: list[float] = []
        self.after = ""  # the first module that runs after the last unit
        self._begun = -1  # the unit that runs backward
        self._ended = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        first, last = self._modules[0], self._modules[-1]
        handles = [module.register_forward_hook(self._leave) for module in self._modules]
        handles.append(first.register_forward_pre_hook(self._enter, with_kwargs=True))
        handles.append(torch.nn.modules.module.register_module_forward_pre_hook(self._see))
        del last
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
        """Unit `number - 1` has made `values`; what is before the first unit counts as one."""
        self.forward.append(self._counter.mark())
        tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
        self.outputs.append(float(sum(each.numel() * each.element_size() for each in tensors if each.dim() > 1)))
        for each in tensors:
            if each.requires_grad and each.is_floating_point():
                each.register_hook(lambda gradient, number=number: self._back(number))  # type: ignore[no-untyped-call]

    def turn(self) -> None:
        """The forward has ended."""
        self.forward.append(self._counter.mark())
        self.outputs.append(0.0)
        self._counter.backward = True
        self._begun = len(self.forward) - 1

    def _back(self, number: int) -> None:
        """The gradient of what unit `number` made has come."""
        if number < self._begun:
            self.backward[self._begun] = self._counter.mark()
            self._begun = number

    def end(self) -> None:
        self.backward[self._begun] = self._counter.mark()


def _units(watch: _Watch, model: nn.Module, names: list[str], styles: dict[int, str]) -> Iterator[Unit]:
    """What is before the units, the units, and what is after them; parts that have nothing are joined to neighbours."""
    owned = [dict(model.get_submodule(name).named_parameters()) for name in names]
    inside = {id(each) for part in owned for each in part.values()}
    rest = {name: each for name, each in model.named_parameters() if id(each) not in inside}
    early, late = _rest(model, names, rest)
    held = [early, *owned, late]
    live = Amount()
    for number, (forward, name) in enumerate(zip(watch.forward, ["", *names, watch.after], strict=True)):
        backward = watch.backward.get(number, OperationCounts())
        before, live = live, forward.live
        start = (
            forward.live if number == len(watch.forward) - 1 else watch.backward.get(number + 1, OperationCounts()).live
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
            watch.outputs[number],
            every,
            learned,
        )


def _above(part: OperationCounts, start: Amount) -> Amount:
    """How far a part rose above what was alive at its start."""
    return Amount(max(0.0, part.peak - part.peak_divided - start.common), max(0.0, part.peak_divided - start.divided))


def _rest(model: nn.Module, names: list[str], rest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters outside of the units: those of modules that stand before the first one, and the others."""
    order = [name for name, _ in model.named_modules()]
    first = order.index(names[0])
    early = {name: each for name, each in rest.items() if order.index(name.rpartition(".")[0]) < first}
    return early, {name: each for name, each in rest.items() if name not in early}


def _unit_names(model: nn.Module) -> tuple[list[str], bool]:
    """The modules that a model is cut between; and whether it is a plain sequence of them."""
    if isinstance(model, nn.Sequential) and len(model) > 1:
        return [name for name, _ in model.named_children()], True
    lists = [
        (name, module) for name, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    weights = {name: sum(each.numel() for each in module.parameters()) for name, module in lists}
    outer = [(name, module) for name, module in lists if len(module) > 1]
    if not outer:
        raise ModelError(
            f"{type(model).__name__} has no nn.Sequential or nn.ModuleList of layers to cut between; a plan needs one"
        )
    name, module = max(outer, key=lambda each: (weights[each[0]], -len(each[0])))
    return [f"{name}.{child}" if name else child for child, _ in module.named_children()], False


def _styles(model: nn.Module, plan: TensorPlan | None, software: Software) -> dict[int, str]:
    """By address: how a plan divides parameters."""
    if plan is None:
        return {}
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters(False))]
    plan.resolve(names)  # which refuses what matches nothing
    found: dict[int, str] = {}
    kinds = {"colwise": "colwise", "colwise-gathered": "gathered", "rowwise": "rowwise", "embedding": "embedding"}
    from fnmatch import fnmatchcase

    for pattern, style in plan.styles.items():
        kind = kinds.get(style) if isinstance(style, str) else None
        if kind == "gathered" and software.name != "penstock":
            kind = "colwise"  # the loss is computed on parts
        for name in names:
            if kind is not None and fnmatchcase(name, pattern):
                for parameter in model.get_submodule(name).parameters(False):
                    if parameter.dim() > 1 or kind == "colwise":
                        found[key_of(parameter)] = kind
    return found


def _tensor_plan(config: TrainConfig, model: nn.Module) -> TensorPlan | None:
    try:
        return plan_of(tensor_plan_of(config, model))
    except UsageError:  # there is no ready plan: no layout with tp is looked at
        return None


def _example(config: TrainConfig, rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """A few rows, as the data would give them."""
    if isinstance(config.data.source, str) and is_function(config.data.source) and config.data.format == "auto":
        batch = open_data(config).first()
        cut = lambda value: value[:rows] if isinstance(value, Tensor) and value.dim() else value  # noqa: E731
        args, kwargs, target = pytree.tree_map(cut, (batch.args, batch.kwargs, batch.target))
        return args, kwargs, target
    ids = torch.zeros(rows, config.data.sequence, dtype=torch.int64)
    if config.model.source.startswith(HUGGINGFACE):
        return (), {"input_ids": ids}, torch.zeros_like(ids)
    return (ids,), {}, torch.zeros_like(ids)


def _shortened(config: TrainConfig) -> tuple[TrainConfig, int | None]:
    """The same model with few of its equal layers, and how many it has; None where that is left as it is."""
    options, source = dict(config.model.options), config.model.source
    model = replace(config.model, init="random")
    if source == "gpt":
        count: int | None = gpt_options(config).layers
        name = "layers"
    elif source.startswith(HUGGINGFACE) and not config.training.freeze:
        shape = _shape_of(config)
        count = getattr(shape, "num_hidden_layers", None)
        name = "num_hidden_layers"
        kinds = getattr(shape, "layer_types", None)
        if count is None or (kinds and len(set(kinds)) > 1) or getattr(shape, "first_k_dense_replace", 0):
            return replace(config, model=model), None
        if kinds:
            options["layer_types"] = list(kinds)[:BUILT]
    else:
        return replace(config, model=model), None
    if count is None or count <= BUILT:
        return replace(config, model=model), None
    return replace(config, model=replace(model, options={**options, name: BUILT})), count


def _shape_of(config: TrainConfig) -> Any:
    from penstock.train.models.huggingface import configuration_of

    return configuration_of(
        replace(config, model=replace(config.model, init=None if folder_of(config) is None else "random"))
    )


def _lengthened(found: Profile, layers: int | None) -> Profile:
    """With as many layers as the model has: the second of those that were built stands for those that were not."""
    if layers is None:
        return found
    names = [unit.name for unit in found.one]
    stem = next(name for name in names if name.endswith("1"))
    place = names.index(stem)

    def longer(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
        middle = [replace(units[place], name=f"{stem[:-1]}{number}") for number in range(1, layers - 1)]
        return (
            *units[:place],
            *middle,
            replace(units[place + BUILT - 2], name=f"{stem[:-1]}{layers - 1}"),
            *units[place + BUILT - 1 :],
        )

    return replace(found, one=longer(found.one), two=longer(found.two))
