"""Builds the model that a plan is for on tensors without memory, with rows to run it on, and has it profiled.

A model of any size is built in a moment that way. Of equal layers only a few are built; the profile is then extended to
as many as the model has.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, PenstockError, UsageError
from penstock.parallel.tensor_parallel.tensor_plan import TensorPlan, plan_of
from penstock.planner.cluster import Software
from penstock.planner.counting import CannotCount, OperationCounter
from penstock.planner.profile import Profile, Unit, owners_of_parameters, profile_model
from penstock.reading import NONSENSE
from penstock.tools.train.build import build_model, freeze, gpt_options
from penstock.tools.train.config.consistent import check_model
from penstock.tools.train.config.device import precision_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE, is_function
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.data.vocabulary import check_positions
from penstock.tools.train.loss import StepLoss, build_loss
from penstock.tools.train.models.huggingface import configuration_of, folder_of, tensor_plan_of

BUILT = 4  # Layers that are built, where more repeat.
IN_MEMORY = "a module in memory"  # The source of a model that no configuration can name.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DATA_DEPENDENT = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def profile_config(config: TrainConfig, software: Software) -> Profile:
    """Count what a configuration trains."""
    check_model(config)
    short, real = _shortened(config)
    half = HALVES.get(precision_of(config))
    source = config.model.source
    with FakeTensorMode(allow_non_fake_inputs=True):
        with _named(f"model.source: {source} cannot be built without memory"):
            model, own_loss = build_model(short)
        if source.startswith(HUGGINGFACE):
            check_positions(config, model)
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

        plan, undivided = _tensor_plan(config, model)
        rows = f"rows of data.source ({config.data.source!r}, data.sequence {config.data.sequence})"
        with _named(f"{source} cannot run on {rows}", model, "; name data that the model takes"):
            found = profile_model(model, train, plan=plan, software=software, half=half, sequence=config.data.sequence)
    return replace(_lengthened(found, real), undivided=undivided)


def profile_module(
    model: nn.Module | Callable[[], nn.Module], example: Any, config: TrainConfig, software: Software
) -> Profile:
    """Count a module, or what a function builds; rows are as `example` shows them."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    half = HALVES.get(precision_of(config))
    with fake:
        if isinstance(model, nn.Module):
            built = _without_memory(model, fake)
        else:
            with _named(f"plan(): {getattr(model, '__qualname__', model)} cannot be called without memory"):
                built = model()
        if not isinstance(built, nn.Module):
            raise UsageError(f"plan(): the function returned a {type(built).__name__}; return an nn.Module")

        def train(rows: int) -> Any:
            given = pytree.tree_map(lambda each: _rows_like(each, rows), example)
            return built(**given) if isinstance(given, dict) else built(*given)

        shown = ", ".join(_shown(each) for each in pytree.tree_leaves(example))
        what = f"plan(): {type(built).__name__} cannot run without memory on rows like example= ({shown})"
        with _named(what, built, "; pass inputs that the model takes, with rows as their first dimension"):
            return profile_model(built, train, software=software, half=half, sequence=config.data.sequence)


@contextmanager
def _named(what: str, model: nn.Module | None = None, remedy: str = "") -> Iterator[None]:
    """Turn what a model raises while it is built or run into an error that says which model, where and why.

    Errors of the counting itself are left as they are, and torch's log of operations that failed is left out.
    """
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    except PenstockError:
        raise
    except (*NONSENSE, RuntimeError) as error:  # The latter also comes from operations that fake tensors do not have.
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if any(frame.f_code is OperationCounter.count.__code__ for frame in frames):
            raise
        if isinstance(error, DATA_DEPENDENT):
            why = f"it looks at its data ({error.func}), which is not there without memory"
            remedy = "; plan a stand-in with the same layers that takes one path for all data"
        elif isinstance(error, CannotCount):
            why, remedy = str(error), ""
        else:
            why = f"{type(error).__name__}: {str(error).rstrip('. ')}"
        raise ModelError(f"{what}: {_place(model, frames)}{why}{remedy}") from error
    finally:
        log.disabled = before


def _place(model: nn.Module | None, frames: list[FrameType]) -> str:
    """Name the innermost module that was running."""
    names = {} if model is None else {id(each): name for name, each in model.named_modules() if name}
    ran = [each for each in (frame.f_locals.get("self") for frame in frames) if id(each) in names]
    return f"in module {names[id(ran[-1])]!r} ({type(ran[-1]).__name__}): " if ran else ""


def _shown(value: Any) -> str:
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _rows_like(value: Any, rows: int) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    return torch.zeros(rows, *value.shape[1:], dtype=value.dtype, requires_grad=False, device="cpu")


def _without_memory(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Copy a model; the copy's parameters and buffers have shapes only."""
    known: dict[int, Any] = {}
    for each in (*model.parameters(), *model.buffers()):
        shape = fake.from_tensor(each.detach())
        known[id(each)] = nn.Parameter(shape, each.requires_grad) if isinstance(each, nn.Parameter) else shape
    return copy.deepcopy(model, known)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers to another type; what is tied stays so."""
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


def _tensor_plan(config: TrainConfig, model: nn.Module) -> tuple[TensorPlan | None, str]:
    """Return how the model is divided over tp; or why no layout with tp is tried, where no ready plan matches it."""
    try:
        plan = plan_of(tensor_plan_of(config, model))
        if plan is not None:
            plan.resolve(owners_of_parameters(model))
        return plan, ""
    except UsageError as error:
        if config.mesh.tensor_plan is not None:
            raise
        return None, str(error)


def _example(config: TrainConfig, rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Make a few rows, as the data would give them."""
    if isinstance(config.data.source, str) and is_function(config.data.source) and config.data.format == "auto":
        batch = open_data(config).first()
        given = (batch.args, batch.kwargs, batch.target)
        args, kwargs, target = pytree.tree_map(lambda each: _rows_like(each, rows), given)
        return args, kwargs, target
    ids = torch.zeros(rows, config.data.sequence, dtype=torch.int64, device="cpu")
    if config.model.source.startswith(HUGGINGFACE):
        return (), {"input_ids": ids}, torch.zeros_like(ids)
    return (ids,), {}, torch.zeros_like(ids)


def _shortened(config: TrainConfig) -> tuple[TrainConfig, int | None]:
    """Return the same model with few of its equal layers, and how many it has; None where that is left as it is."""
    options, source = dict(config.model.options), config.model.source
    model, count, name = replace(config.model, init="random"), None, "layers"
    if source == "gpt":
        count = gpt_options(config).layers
    elif source.startswith(HUGGINGFACE) and not config.training.freeze:
        in_folder = folder_of(config) is not None
        shape = configuration_of(replace(config, model=model if in_folder else replace(model, init=None)))
        kinds, name = getattr(shape, "layer_types", None), "num_hidden_layers"
        if not (kinds and len(set(kinds)) > 1) and not getattr(shape, "first_k_dense_replace", 0):
            count = getattr(shape, name, None)
        if kinds:
            options["layer_types"] = list(kinds)[:BUILT]
    if count is None or count <= BUILT:
        return replace(config, model=model), None
    return replace(config, model=replace(model, options={**options, name: BUILT})), count


def _lengthened(found: Profile, layers: int | None) -> Profile:
    """Extend it to as many layers as the model has: the second that was built stands for those that were not."""
    if layers is None:
        return found
    names = [unit.name for unit in found.one]
    stem = next(name for name in names if name.endswith("1"))
    place = names.index(stem)

    def longer(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
        middle = [replace(units[place], name=f"{stem[:-1]}{number}") for number in range(1, layers - 1)]
        last = replace(units[place + BUILT - 2], name=f"{stem[:-1]}{layers - 1}")
        return (*units[:place], *middle, last, *units[place + BUILT - 1 :])

    return replace(found, one=longer(found.one), two=longer(found.two))
