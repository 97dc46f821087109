"""The way to cut that needs no example: lists of stage modules, and `nn.Sequential`, by the position of layers.

A layer may stand on several stages. Its parameters are tied and its gradients are summed. What it writes to its
buffers, or to attributes of its own, is another matter: in a plain model each microbatch passes the layer at all of its
places before the next one comes; stages run side by side, and on processes each has a copy. Batch norms are refused
before anything runs; of other layers only a call shows it (`SharedLayers`).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.declared_skips import SkipRoutes, find_routes
from penstock.model.names import dotted_name
from penstock.model.part import OUTPUT, Names, StagePart, state_names
from penstock.model.replay.recording.snapshot import changed_by, own_state
from penstock.model.staged_model import StagedModel
from penstock.model.transformers_models import origin_of
from penstock.rules import is_count
from penstock.schedule.topology import Topology


@dataclass(frozen=True)
class Routed:
    """What a stage of a list returns when a part of its output skips stages: `Routed(x, {3: skip})`.

    Args:
        output: The value for the next stage.
        to: Values for later stages, by stage. Each arrives there as one more positional argument, in the order of the
            sending stages.
    """

    output: Any
    to: Mapping[int, Any] = field(default_factory=dict)


class ModulePart(StagePart):
    """One stage of a list or a Sequential: `module`, and how to call it.

    `names` maps the module's own parameter and buffer names to those of the whole model.
    `entrances` are the names of the model's inputs: where a later stage gives one of its own places
    the same name (`x`, `input`), what came from the stage before stands there, not the model's input.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        names: dict[str, str],
        topology: Topology,
        *,
        copied: Sequence[nn.Module] = (),
        spread: bool,
        entrances: Sequence[str] = (),
        shared: SharedLayers | None = None,
    ) -> None:
        super().__init__(index)
        self.module = module
        self.names = names
        self.copied = copied
        self._previous = index - 1 if index - 1 in topology.producers(index) else None
        self._skips_in = tuple(stage for stage in topology.producers(index) if stage != index - 1)
        self._skips_out = frozenset(stage for stage in topology.consumers(index) if stage != index + 1)
        self._next = index + 1 if index + 1 < topology.stages else OUTPUT
        self._spread = spread
        self.shared = shared
        self.takes = _keywords(module)
        self._order = tuple(name if name in entrances else None for name in _positional(module))

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        if self._previous is None:
            inputs: tuple[Any, ...] = args
        else:
            main = arrived[self._previous]
            inputs = main if self._spread and type(main) is tuple else (main,)
        if self._skips_in:
            inputs = (*inputs, *(arrived[stage] for stage in self._skips_in))
        if kwargs:
            filled = () if self._previous is None else self._order[: len(inputs)]
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if (self.takes is None or name in self.takes) and name not in filled
            }
        if self.shared is not None:
            result = self.shared.kept(lambda: self.module(*inputs, **kwargs))
        else:
            result = self.module(*inputs, **kwargs)
        if not self._skips_out and type(result) is not Routed:
            return {self._next: result}
        return self._routes(result)

    def _routes(self, result: Any) -> dict[int, Any]:
        routed = result if isinstance(result, Routed) else Routed(result)
        if set(routed.to) != self._skips_out:
            raise ModelError(
                f"stage {self.index} sends to stages {sorted(routed.to)} beside the next one, but "
                f"{sorted(self._skips_out)} were declared; return penstock.Routed(output, {{stage: value}}) "
                f"with exactly the stages of skips="
            )
        return {self._next: routed.output, **routed.to}


class SkippingPart(ModulePart):
    """A stage whose layers declare skips, which it stashes for later stages or takes from earlier ones."""

    def __init__(self, routes: SkipRoutes, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._routes_of_skips = routes

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Compute, with the skips that have arrived in reach of the layers that take them."""
        return self._routes_of_skips.around(super().run, arrived, args, kwargs)


def layers_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers of an `nn.Sequential` in order, by name; one that stands there twice is there twice."""
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]


def more_than_its_layers(model: Any) -> str:
    """Describe what a container does beside calling its layers in turn, and what a cut by position would leave out."""
    if not isinstance(model, (nn.Sequential, nn.ModuleList)):
        return ""
    kind = nn.Sequential if isinstance(model, nn.Sequential) else nn.ModuleList
    if type(model).forward is not kind.forward or "forward" in vars(model):
        return f"{type(model).__name__} has a forward of its own"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if kind is nn.Sequential and any(getattr(model, name, None) for name in hooks):
        return f"the {type(model).__name__} has hooks on itself"
    if kind is nn.ModuleList and (own := [*model._parameters, *model._buffers]):
        return f"the {type(model).__name__} has parameters or buffers of its own ({', '.join(own)})"
    return ""


def split_by_position(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None,
    balance: Sequence[int] | None,
    skips: Iterable[tuple[int, int]] = (),
) -> StagedModel:
    if more := more_than_its_layers(model):
        raise ModelError(
            f"{more}, which a cut by position would leave out; pass example=(x,) to cut it by its forward, or "
            f"nn.Sequential(*model) to go by its layers alone"
        )
    if isinstance(model, nn.Sequential):
        groups = _groups(layers_of(model), stages, balance)
        modules: list[nn.Module] = [nn.Sequential(OrderedDict(group)) for group in groups]
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):  # what hangs on the container itself
            modules[0].__dict__[table] = getattr(model, table)
        counts = ", ".join(str(len(group)) for group in groups)
        names = [Names({name: name for name in state_names(module)}) for module in modules]
        how, spread = f"nn.Sequential by position, layers per stage: {counts}", False
    elif isinstance(model, nn.ModuleList) or (isinstance(model, Sequence) and not isinstance(model, nn.Module)):
        modules = list(model)
        _check_list(modules, stages, balance)
        names = [
            Names({name: f"{index}.{name}" for name in state_names(module)}, f"{index}.")
            for index, module in enumerate(modules)
        ]
        how, spread = f"a list of {len(modules)} stage modules", True
    else:
        raise ModelError(
            f"{type(model).__name__} is neither an nn.Sequential nor a list of stage modules; "
            f"pass nn.Sequential(...) with stages=, or a list with one module for each stage"
        )
    refuse_shared_norms(modules, names)
    topology = Topology.chain(len(modules), skips)
    routes = find_routes(modules)
    entrances = _positional(modules[0])

    def part(index: int, module: nn.Module) -> ModulePart:
        skips = SkipRoutes.of(index, module, routes)
        return (ModulePart if skips is None else partial(SkippingPart, skips))(
            index,
            module,
            names[index],
            topology,
            copied=[model] if isinstance(model, nn.Sequential) else (),
            spread=spread,
            entrances=entrances,
            shared=SharedLayers.of(index, modules, names[index]),
        )

    parts = tuple(map(part, range(len(modules)), modules))
    whole = Topology(len(modules), [*topology.edges, *routes])
    balance = tuple(1 if spread else len(module._modules) for module in modules)
    origin = origin_of(model)
    return StagedModel(parts, whole, how, model, aliases=_aliases(modules, names), balance=balance, origin=origin)


def _aliases(modules: Sequence[nn.Module], names: Sequence[Names]) -> dict[str, str]:
    """Name a parameter that stands in several places by its first name, also on a rank that has only a later one."""
    first: dict[int, str] = {}
    found = {}
    for module, own in zip(modules, names, strict=True):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[own[name]] = first.setdefault(id(parameter), own[name])
    return {name: known for name, known in found.items() if name != known}


def _check_list(modules: Sequence[Any], stages: int | None, balance: Sequence[int] | None) -> None:
    if not modules:
        raise ModelError("the list of stage modules is empty; pass one module for each stage")
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ModelError(f"entry {index} of the list of stages is a {type(module).__name__}, not an nn.Module")
    if stages is not None and stages != len(modules):
        raise ModelError(f"stages={stages}, but the list has {len(modules)} stage modules; leave stages= out")
    if balance is not None:
        raise ModelError("balance= cuts an nn.Sequential; a list of stage modules is cut already")


def _groups(
    layers: list[tuple[str, nn.Module]], stages: int | None, balance: Sequence[int] | None
) -> list[list[tuple[str, nn.Module]]]:
    count = len(layers)
    if balance is None:
        if stages is None:
            raise ModelError(f"say how many stages to cut the {count} layers into: stages=2, or balance=[3, 2, ...]")
        if not 1 <= stages <= count:
            raise ModelError(f"{count} layers cannot make {stages} stages; pass stages= from 1 to {count}")
        size, larger = divmod(count, stages)
        balance = [size + 1] * larger + [size] * (stages - larger)
    balance = list(balance)
    if any(not is_count(size) or size < 1 for size in balance):
        raise ModelError(f"balance={balance}: each stage needs at least 1 layer")
    if sum(balance) != count:
        raise ModelError(
            f"balance={balance} sums to {sum(balance)}, but the model has {count} layers; every layer needs a stage"
        )
    if stages is not None and stages != len(balance):
        raise ModelError(f"stages={stages}, but balance={balance} has {len(balance)} entries; leave one of them out")
    groups, first = [], 0
    for size in balance:
        groups.append(layers[first : first + size])
        first += size
    return groups


def _keywords(module: nn.Module) -> frozenset[str] | None:
    """Return the keyword arguments that a module's forward takes; None when it takes any."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in kinds)


def _positional(module: nn.Module) -> tuple[str, ...]:
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def refuse_shared_norms(modules: Sequence[nn.Module], names: Sequence[Mapping[str, str]]) -> None:
    """Refuse norms with running statistics in two stages: these have one order of updates, which would not be kept."""
    where: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.training:
                whole = names[index][dotted_name(name, "running_mean")].removesuffix(".running_mean")
                first, known = where.setdefault(id(layer), (index, whole))
                if first != index:
                    raise ModelError(
                        f"layers {known} and {whole} are one batch norm, on stages {first} and {index}, which would "
                        f"update its running statistics in another order; cut so that both are on one stage "
                        f"(balance=[...]), use a copy for each place, or put it in eval mode"
                    )


class SharedLayers:
    """What one stage's layers keep that other stages have as well, in buffers or plain attributes: it must stay."""

    def __init__(self, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> None:
        others = {
            id(layer): stage for stage, module in enumerate(modules) if stage != index for layer in module.modules()
        }
        self._index = index
        shared = {name: layer for name, layer in modules[index].named_modules() if id(layer) in others}
        inside = {id(inner) for layer in shared.values() for inner in layer.modules() if inner is not layer}
        self._found = [(name, others[id(layer)], layer) for name, layer in shared.items() if id(layer) not in inside]
        self._names = names

    @classmethod
    def of(cls, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> Self | None:
        state = cls(index, modules, names)
        return state if state._found else None

    def kept(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, if it leaves all of that as it is."""
        before = [own_state(layer) for _, _, layer in self._found]
        result = run()
        for (prefix, other, layer), old in zip(self._found, before, strict=True):
            for name in (*changed_by(layer, old), *(old.keys() - own_state(layer).keys())):
                holder = layer.get_submodule(name.rpartition(".")[0])
                if holder.training:
                    raise self._refusal(holder, dotted_name(prefix, name), other)
        return result

    def _refusal(self, holder: nn.Module, name: str, other: int) -> ModelError:
        leaf = name.rpartition(".")[2]
        kind = f"buffer {self._names[name]}" if leaf in holder._buffers else f"attribute {leaf}"
        return ModelError(
            f"stages {self._index} and {other} have one {type(holder).__name__}, which changes its {kind} at each "
            f"call; on two stages the order of updates would differ. Cut so that both places are on one stage "
            f"(balance=[...]), or use a copy for each"
        )
