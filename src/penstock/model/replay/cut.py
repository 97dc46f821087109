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
from penstock.model.replay.modes import also_in_training, check_repeatable
from penstock.model.replay.part import ReplayPart
from penstock.model.replay.plan import StagePlan, plan_stages, state_across
from penstock.model.replay.recording.example_run import record
from penstock.model.replay.recording.unit_calls import ForwardRecording, Leaf
from penstock.model.replay.recording.units import entered_units, find_units, smaller_units, units_of_a_fair_size
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
    kwargs = {**defaults, **kwargs}
    split = _Split(model, stage_count(stages, balance.counts, split_at), balance, split_at, defaults)
    split.look(args, kwargs)
    weights = profile_calls(model, split.recording, args, kwargs, **balance.profiling)
    return split.assemble(weights, split.cuts(weights), Shapes(split.modules))


class _Split:
    """One model on its way into stages; it keeps nothing of the example."""

    def __init__(
        self, model: nn.Module, stages: int, balance: Balancing, split_at: Sequence[str], defaults: Mapping[str, Any]
    ) -> None:
        self._model, self._stages, self._balance = model, stages, balance
        self._split_at, self._defaults = split_at, defaults
        self.modules = dict(model.named_modules())
        self._units: list[str] = []
        self.recording = ForwardRecording()

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find units and their calls; where too few calls are made, open larger units and run it again."""
        model, modules = self._model, self.modules
        instead = (lambda name: shapes_only(name, modules[name])) if is_lazy(model) else None

        def run(units: list[str]) -> None:
            once = partial(record, model, units, args, kwargs, instead)
            again = once if instead else partial(check_repeatable, once)
            recording = _with_full_caches(once)
            recording = recording if instead else check_repeatable(once, recording)
            also_in_training(list(modules.values()), recording, again)
            self._units, self.recording = units, recording

        run(find_units(model, self._split_at))
        while True:
            count = len(self._starts())
            smaller = entered_units(model, self._units, self.recording)
            if smaller is None and (self._split_at or count >= self._stages):
                break
            smaller = smaller or smaller_units(model, self._units)
            if smaller is None:
                raise _too_few(model, self._units, self.recording, count, self._stages)
            run(smaller)
        if not self._split_at:
            self._even_out(run)

    def _even_out(self, run: Callable[[list[str]], None]) -> None:
        """Open units that are too large for a fair cut, as long as what is inside of them can be followed as well.

        A unit may decide by its values what it calls (experts that get no token); as a part of the glue, that would
        have to take the path of the example in every microbatch.
        """
        while (smaller := units_of_a_fair_size(self._model, self._units, self._stages)) is not None:
            before, count = (self._units, self.recording), len(self._starts())
            try:
                run(smaller)
            except ModelError:
                return
            if self.recording.reads_values > before[1].reads_values or len(self._starts()) <= count:
                self._units, self.recording = before
                return

    def _with_parameters(self) -> list[int]:
        return [
            number
            for number, call in enumerate(self.recording.calls)
            if not call.glue and next(self.modules[call.unit].parameters(), None) is not None
        ]

    def _starts(self) -> list[int]:
        """Return the calls with which a stage may begin: of units with parameters, and where no state lies across."""
        return [number for number in self._with_parameters() if not state_across(self.recording, number)]

    def cuts(self, weights: Sequence[Weight]) -> list[int]:
        starts, balance = self._starts(), self._balance
        if self._split_at:
            return _cuts_at(self.recording, self._split_at, starts, self._with_parameters())
        if balance.counts is not None:
            has = f"makes {len(starts)} unit calls"
            return [starts[number] for number in first_pieces(balance.counts, self._stages, len(starts), has)]
        return balance.cuts(self._stages, weights, starts[1:], _crossing(self.recording))

    def assemble(self, weights: Sequence[Weight], cuts: Sequence[int], shapes: Shapes) -> StagedModel:
        """Make the stages for these cuts; `recut` of the result makes those for others, with what shapes are known."""
        model, plan = self._model, plan_stages(self.recording, cuts)
        owned = _owners(self._units, plan)
        loose = _loose(model, plan, owned)
        parts = tuple(
            ReplayPart(index, model, plan, shapes, owned[index], loose[index], self._defaults)
            for index in range(plan.stages)
        )
        starts = self._starts()
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
            recut=lambda others: self.assemble(weights, others, shapes),
            order=tuple(model.state_dict(keep_vars=True)),
            origin=origin_of(model),
        )


def _too_few(model: nn.Module, units: list[str], recording: ForwardRecording, count: int, stages: int) -> ModelError:
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
    """Make a recording that is refused once more: a unit that fills a cache of the process leaks a tensor.

    Later runs find the cache full (`functools.lru_cache`). Without this, a model would be cut in one way if it is the
    first of its kind in a process, and in another if it is the second.
    """
    try:
        return once()
    except ModelError:
        return once()


def _repeated(model: nn.Module, parts: Sequence[ReplayPart]) -> dict[str, str]:
    """Map names of what hangs in the tree twice (`self.last = self.layers[-1]`) to the one that it has here."""
    held = {name for part in parts for name in part.names.values()}
    saved = model.state_dict(keep_vars=True)
    own = {id(value): name for name, value in reversed(saved.items()) if name in held}
    return {name: own[id(value)] for name, value in saved.items() if name not in held and id(value) in own}


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
    uses = [number for number, unit in enumerate(names) if unit == name]
    if len(uses) < use or uses[use - 1] not in starts:
        raise ModelError(
            f"split_at: {name}#{use} is not a place to cut: the model calls the unit {name!r} {len(uses)} times"
            + (", and it updates itself, so that all its calls belong on one stage" if len(uses) >= use else "")
        )
    return uses[use - 1]


def _crossing(recording: ForwardRecording) -> list[float]:
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
    """Return the units of each stage: those that it calls; one that nobody calls stays with its neighbour before it."""
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
    """Return what each stage has beside its units: what its glue reads; all that is nobody's is stage 0's."""
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
