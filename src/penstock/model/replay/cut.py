"""The way in: an ordinary module and an example, out comes a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.balance.partition import bytes_across, counts_between
from penstock.model.balance.profile import Weight, profile_calls
from penstock.model.balance.request import Balancing, first_pieces, stage_count
from penstock.model.lazy import is_lazy
from penstock.model.names import name_and_use, similar_names
from penstock.model.part import first_names
from penstock.model.replay.modes import also_in_training
from penstock.model.replay.part import ReplayPart
from penstock.model.replay.plan import StagePlan, plan_stages, state_across
from penstock.model.replay.recording.example_run import record
from penstock.model.replay.recording.unit_calls import ForwardRecording, Leaf
from penstock.model.replay.recording.units import entered_units, find_units, smaller_units, units_of_a_fair_size
from penstock.model.replay.repeatability import check_repeatable
from penstock.model.replay.shapes import Shapes, shapes_only
from penstock.model.staged_model import StagedModel
from penstock.model.transformers_models import default_inputs, origin_of


def split_by_replay(
    model: nn.Module,
    stages: int | None,
    example: tuple[Any, ...] | Mapping[str, Any],
    balance: Balancing,
    split_at: Sequence[str] = (),
) -> StagedModel:
    """Cut a model without tracing it; see `recording.example_run`, `plan` and `part`."""
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    defaults = default_inputs(model, kwargs)
    count = stage_count(stages, balance.counts, split_at)
    modules = dict(model.named_modules())
    units, recording = _recorded(model, modules, count, split_at, args, {**defaults, **kwargs})
    weights = profile_calls(
        model,
        recording,
        args,
        {**defaults, **kwargs},
        optimizer=balance.optimizer,
        measured=balance.runs and balance.measures,
        agree=balance.agree if balance.runs else None,
        device=balance.device,
    )
    cuts = _cuts(modules, recording, weights, count, balance, split_at)
    return _assemble(model, units, recording, weights, cuts, defaults)


def _assemble(
    model: nn.Module,
    units: list[str],
    recording: ForwardRecording,
    weights: Sequence[Weight],
    cuts: Sequence[int],
    defaults: Mapping[str, Any],
    shapes: Shapes | None = None,
) -> StagedModel:
    """The stages for these cuts; `recut` of the result makes those for others, with what is known of shapes by then."""
    modules = dict(model.named_modules())
    plan = plan_stages(recording, cuts)
    shapes = shapes or Shapes(modules)
    owned = _owners(units, plan)
    loose = _loose(model, plan, owned)
    parts = tuple(
        ReplayPart(index, model, plan, shapes, owned[index], loose[index], defaults) for index in range(plan.stages)
    )
    starts = _starts(modules, recording)
    balance = counts_between(cuts, starts)
    return StagedModel(
        parts,
        plan.topology,
        f"replay of the model's own forward, units with parameters per stage: {', '.join(map(str, balance))}",
        model,
        first_names(model),
        _repeated(model, parts),
        weights=tuple(weights),
        balance=balance,
        cuts=tuple(cuts),
        allowed=tuple(starts[1:]),
        recut=lambda others: _assemble(model, units, recording, weights, others, defaults, shapes),
        order=tuple(model.state_dict(keep_vars=True)),
        origin=origin_of(model),
    )


def _recorded(
    model: nn.Module,
    modules: dict[str, nn.Module],
    stages: int,
    split_at: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[str], ForwardRecording]:
    """The units and their calls; where too few calls are made, larger units are opened and it is run again."""
    instead = (lambda name: shapes_only(name, modules[name])) if is_lazy(model) else None

    def run(units: list[str]) -> ForwardRecording:
        once = partial(record, model, units, args, kwargs, instead)
        again = once if instead else partial(check_repeatable, once)
        recording = _with_full_caches(once)
        recording = recording if instead else check_repeatable(once, recording)
        also_in_training(list(modules.values()), recording, again)
        return recording

    units = find_units(model, split_at)
    recording = run(units)
    while True:
        count = len(_starts(modules, recording))
        smaller = entered_units(model, units, recording)
        if smaller is None and (split_at or count >= stages):
            return _evened(model, modules, run, units, recording, 0 if split_at else stages)
        smaller = smaller or smaller_units(model, units)
        if smaller is None:
            raise _too_few(model, units, recording, count, stages)
        units, recording = smaller, run(smaller)


def _evened(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    run: Callable[[list[str]], ForwardRecording],
    units: list[str],
    recording: ForwardRecording,
    stages: int,
) -> tuple[list[str], ForwardRecording]:
    """Open units that are too large for a fair cut, as long as what is inside of them can be followed as well.

    A unit may decide by its values what it calls (experts that get no token); as a part of the glue, that would have
    to take the path of the example in every microbatch.
    """
    while stages and (smaller := units_of_a_fair_size(model, units, stages)) is not None:
        try:
            finer = run(smaller)
        except ModelError:
            break
        gained = len(_starts(modules, finer)) - len(_starts(modules, recording))
        if finer.reads_values > recording.reads_values or gained <= 0:
            break
        units, recording = smaller, finer
    return units, recording


def _too_few(model: nn.Module, units: list[str], recording: ForwardRecording, count: int, stages: int) -> ModelError:
    """The model calls too few units with parameters, and all of them were opened."""
    names = ", ".join(unit or "the model as a whole" for unit in units[:8]) + (", ..." if len(units) > 8 else "")
    if not count:
        return ModelError(
            f"{type(model).__name__}'s forward calls none of its modules with parameters"
            + (f" ({names})" if names else ", all of which it reads itself")
            + ", so that there is nowhere to cut"
        )
    across = dict.fromkeys(state_across(recording, number) for number in range(len(recording.calls)))
    why = ", ".join(filter(None, across))
    return ModelError(
        f"{type(model).__name__} calls units with parameters {'once' if count == 1 else f'{count} times'} ({names})"
        + (f" where no cut would part {why} from code that reads or changes it" if why else "")
        + f", too few for {stages} stages; pass stages={count} or fewer"
        + (", or let the units that change it return it; use one norm per place" if why else "")
    )


def _with_full_caches(once: Callable[[], ForwardRecording]) -> ForwardRecording:
    """A recording that is refused is made once more: a unit that fills a cache of the process leaks a tensor.

    Later runs find the cache full (`functools.lru_cache`). Without this, a model would be cut in one way if it is the
    first of its kind in a process, and in another if it is the second.
    """
    try:
        return once()
    except ModelError:
        return once()


def _repeated(model: nn.Module, parts: Sequence[ReplayPart]) -> dict[str, str]:
    """What hangs in the tree twice (`self.last = self.layers[-1]`) has two names in the model's state, one here."""
    held = {name for part in parts for name in part.names.values()}
    saved = model.state_dict(keep_vars=True)
    own = {id(value): name for name, value in reversed(saved.items()) if name in held}
    return {name: own[id(value)] for name, value in saved.items() if name not in held and id(value) in own}


def _cuts(
    modules: dict[str, nn.Module],
    recording: ForwardRecording,
    weights: Sequence[Weight],
    stages: int,
    balance: Balancing,
    split_at: Sequence[str],
) -> list[int]:
    starts = _starts(modules, recording)
    if split_at:
        return _cuts_at(recording, split_at, starts, _with_parameters(modules, recording))
    if balance.counts is not None:
        has = f"makes {len(starts)} unit calls"
        return [starts[number] for number in first_pieces(balance.counts, stages, len(starts), has)]
    return balance.cuts(stages, weights, starts[1:], _crossing(recording))


def _starts(modules: Mapping[str, nn.Module], recording: ForwardRecording) -> list[int]:
    """The calls with which a stage may begin: of units that own parameters, and where no state lies across."""
    return [number for number in _with_parameters(modules, recording) if not state_across(recording, number)]


def _with_parameters(modules: Mapping[str, nn.Module], recording: ForwardRecording) -> list[int]:
    return [
        number
        for number, call in enumerate(recording.calls)
        if not call.glue and next(modules[call.unit].parameters(), None) is not None
    ]


def _cuts_at(recording: ForwardRecording, split_at: Sequence[str], starts: list[int], owning: list[int]) -> list[int]:
    calls = recording.calls
    cuts = []
    names = [call.unit for call in calls]
    for place in split_at:
        name, use = name_and_use(place)
        found = [number for number, unit in enumerate(names) if unit == name or unit.startswith(f"{name}.")]
        if not found:
            hint = similar_names(name, names, "units")
            raise ModelError(f"split_at: no unit {name!r} is called in the model's forward{hint}")
        cuts.append(found[0] if use == 1 else _later_use(name, use, names, starts))
    if cuts != sorted(set(cuts)):
        raise ModelError(f"split_at={list(split_at)} is not in the order in which the model calls its units")
    for first, end, name in zip([0, *cuts], [*cuts, len(calls)], ["", *split_at], strict=True):
        if not any(first <= number < end for number in owning):
            where = f"from {name!r} on" if name else f"before {split_at[0]!r}"
            raise ModelError(f"split_at={list(split_at)}: the stage {where} would have no unit with parameters")
    return cuts


def _later_use(name: str, use: int, names: list[str], starts: list[int]) -> int:
    """The call with which a stage begins that has a unit of a stage before it again."""
    uses = [number for number, unit in enumerate(names) if unit == name]
    if len(uses) < use or uses[use - 1] not in starts:
        raise ModelError(
            f"split_at: {name}#{use} is not a place to cut: the model calls the unit {name!r} {len(uses)} times"
            + (", and it updates itself, so that all its calls belong on one stage" if len(uses) >= use else "")
        )
    return uses[use - 1]


def _crossing(recording: ForwardRecording) -> list[float]:
    """How many bytes of values cross a cut before each call."""
    calls = recording.calls
    last_use: dict[tuple[int, int], int] = {}
    for number, call in enumerate(calls):
        last_use.update({mark: number for mark in call.needs if mark[0] >= 0})
    last_use.update({mark: len(calls) for mark in recording.output if mark[0] >= 0})
    made = ((number, last, calls[number].leaves[place]) for (number, place), last in last_use.items())
    spans = (
        (number, last, float(leaf.dtype.itemsize * math.prod(leaf.shape)))
        for number, last, leaf in made
        if isinstance(leaf, Leaf)
    )
    return bytes_across(spans, len(calls))


def _owners(units: list[str], plan: StagePlan) -> list[list[str]]:
    """The units of each stage: those that it calls; one that nobody calls stays with its neighbour before it."""
    owned: list[list[str]] = [plan.units_of(stage) for stage in range(plan.stages)]
    called = {unit for names in owned for unit in names}
    stage = 0
    for unit in units:
        if unit in called:
            stage = next(index for index, names in enumerate(owned) if unit in names)
        else:
            owned[stage].append(unit)
    return owned


def _loose(model: nn.Module, plan: StagePlan, owned: list[list[str]]) -> list[dict[str, Tensor]]:
    """What a stage has beside its units: the parameters and buffers that its glue reads; all others are stage 0's."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    every: dict[str, Tensor] = {**parameters, **buffers}
    loose = [{name: every[name] for name in plan.glue_parameters[stage]} for stage in range(plan.stages)]
    modules = dict(model.named_modules())
    covered = {id(value) for names in owned for name in names for value in _state(modules[name])}
    for stage in range(plan.stages):
        inside = {id(value) for name in owned[stage] for value in _state(modules[name])}
        loose[stage] = {name: value for name, value in loose[stage].items() if id(value) not in inside}
        covered.update(map(id, loose[stage].values()))
    saved = model.state_dict(keep_vars=True)
    loose[0].update({name: value for name, value in parameters.items() if id(value) not in covered})
    loose[0].update({name: value for name, value in buffers.items() if name in saved and id(value) not in covered})
    return loose


def _state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
