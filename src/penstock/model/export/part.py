"""One stage of a captured model, as the runtime sees it.

The stage's module has no forward: it holds the parameters and buffers that the stage's graph reads, the user's own
objects under their own names. A capture for another mode, or for sizes that the first does not hold for, is made when
it is first needed, and cut in the same places.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.devices import device_types
from penstock.errors import ModelError
from penstock.model.export.capture import Arguments, Capture, Inputs, capture, is_channels_last, put_together
from penstock.model.export.cut_places import GraphCut, find_cuts
from penstock.model.export.operations import Values
from penstock.model.export.proof import prove, runs
from penstock.model.export.stage_graphs import StageGraph, build_stages
from penstock.model.lazy import is_lazy
from penstock.model.lru_cache import LruCache
from penstock.model.moved import moved
from penstock.model.original.placeholders import with_memory
from penstock.model.original.settings import OWN, AttributeChange, value_key
from penstock.model.part import OUTPUT, Names, StagePart
from penstock.model.replay.modes import in_modes
from penstock.schedule.topology import Topology

MOST_CAPTURES = 16  # Captures of one setting, and settings: one that changes at every step would capture for ever.


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model is on as a whole, but for what has no memory yet."""
    found = (tensor.device for tensor in all_tensors(model).values() if tensor.device.type != "meta")
    return next(found, torch.device("cpu"))


def _autocast() -> Any:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types())


@dataclass(frozen=True)
class Program:
    """A capture and its stages."""

    capture: Capture
    stages: list[StageGraph]
    autocast: Any = field(default_factory=_autocast)  # The state at its capture: its types are in the graph.


class GraphPrograms:
    """The captures of one model, shared by its parts.

    A capture holds for what the model was set to: the modes of its modules, their plain attributes, the types and
    shapes of its buffers. The graph has all of that built in, so that each such setting has captures of its own.
    """

    def __init__(self, model: nn.Module, arguments: Arguments, cuts: Sequence[GraphCut], first: Program) -> None:
        self._model = model
        self._arguments = arguments
        self._cuts = cuts
        self._home = device_of(model)
        self._modules = list(model.modules())
        self._kept: list[Any] = []
        self.follow()
        self._made: dict[Any, list[Program]] = {self._key(self.modes): [first]}
        self._known: LruCache[Program] = LruCache()
        self._refused: dict[tuple[bool, ...], str] = {}
        self._lock = threading.Lock()
        self.topology = Topology(len(first.stages), _edges(first))
        self.held: list[set[str]] = []  # Names of what each stage holds.

    def prove(self, inputs: Inputs) -> None:
        """Check that the graph computes what the model does, and note what other modes would be refused for.

        A model that is all in eval mode, as `from_pretrained` returns it, will be trained: that graph is made and
        proved as well.
        """
        if is_lazy(self._model):
            return  # nothing can be run
        (first,) = self._made[self._key(self.modes)]
        prove(self._model, self._arguments, first.capture, first.stages, inputs)
        for modes in {(True,) * len(self.modes), (False,) * len(self.modes)} - {self.modes}:
            with in_modes(self._modules, modes):
                try:
                    if runs(self._model, self._arguments, inputs) and any(modes) and not any(self.modes):
                        made = self._captured(modes, inputs)
                        if made is not None:
                            prove(self._model, self._arguments, made.capture, made.stages, inputs)
                except ModelError as error:
                    self._refused[modes] = str(error)

    def _captured(self, modes: tuple[bool, ...], inputs: Inputs) -> Program | None:
        """Return the program in that mode; None where these inputs have none, as another microbatch may."""
        try:
            return self._at(modes, inputs)
        except ModelError:
            return None

    def follow(self) -> None:
        self.modes = tuple([module.training for module in self._modules])
        self._settings = _settings(self._modules, self._kept)

    def _key(self, modes: tuple[bool, ...]) -> Any:
        return modes, self._settings

    def find(self, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, list[Any]]:
        """Return the program for these inputs, and their tensors; in evaluation, that of a model all in eval mode."""
        inputs = self._arguments.inputs(args, kwargs)
        return self._at(self.modes if training else (False,) * len(self.modes), inputs), inputs.tensors

    def _at(self, modes: tuple[bool, ...], inputs: Inputs) -> Program:
        if modes in self._refused:
            raise ModelError(self._refused[modes])
        sizes = tuple((tensor.shape, tensor.dtype, is_channels_last(tensor)) for tensor in inputs.tensors)
        key = (self._key(modes), inputs.template.key(), sizes, _autocast())
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known.put(key, self._find(modes, inputs))
        return known

    def _find(self, modes: tuple[bool, ...], inputs: Inputs) -> Program:
        reasons, plain = [], inputs.template.key()
        made_so_far = self._made.setdefault(self._key(modes), [])
        for program in made_so_far:
            if program.capture.key != plain:
                reason: str | None = "other inputs, or other plain values among them"
            elif program.autocast != _autocast():
                reason = "another state of torch.autocast"
            else:
                reason = program.capture.misfit(inputs.tensors)
            if reason is None:
                return program
            reasons.append(reason)
        if len(reasons) >= MOST_CAPTURES:
            raise ModelError(
                f"the model was captured {len(reasons)} times and none fits this microbatch: it has {reasons[-1]}; "
                f"pad the inputs to a few shapes, or pass a list of stage modules"
            )
        count = len({settings for _, settings in self._made})
        if count > MOST_CAPTURES:
            raise ModelError(
                f"attributes of the model have had {count} different values, and each needed another capture, "
                f"because a graph has them built in; make a value that changes often a registered buffer"
            )
        with in_modes(self._modules, modes), with_memory(self._model), self._at_home():
            at_home = replace(inputs, tensors=[tensor.to(self._home) for tensor in inputs.tensors])
            made = capture(self._model, self._arguments, at_home)
        values = Values(made)
        tensors_of = all_tensors(self._model)
        program = Program(made, build_stages(values, find_cuts(values, tensors_of, self._cuts), self._home))
        self._check(program, tensors_of, "training" if any(modes) else "evaluation", reasons)
        made_so_far.append(program)
        return program

    def _at_home(self) -> AbstractContextManager[Any]:
        """Have the model on the one device on which it was captured first; its stages may be on several by now."""
        if all(tensor.device in (self._home, torch.device("meta")) for tensor in all_tensors(self._model).values()):
            return nullcontext()
        return moved(self._model, partial(torch.zeros_like, device=self._home))

    def _check(self, program: Program, tensors: dict[str, Tensor], mode: str, reasons: list[str]) -> None:
        """Refuse stages that need something which was not arranged at the first capture."""
        why = f"; it was captured again for {mode}" + (f" because of {reasons[-1]}" if reasons else "")
        new = sorted(_edges(program) - set(self.topology.edges))
        if new:
            raise ModelError(
                f"for this microbatch stage {new[0][0]} would have to feed stage {new[0][1]}, which it does not with "
                f"the example{why}. Pass an example= like it, or cut elsewhere with split_at="
            )
        for index, stage in enumerate(program.stages):
            here = {id(tensors[name]) for name in self.held[index]}
            for name, _ in stage.state:
                if id(tensors[name]) not in here:
                    raise ModelError(
                        f"for this microbatch stage {index} reads {name}, which it does not hold{why}. Pass an "
                        f"example= like it, or cut elsewhere with split_at="
                    )


def _edges(program: Program) -> set[tuple[int, int]]:
    return {(source, target) for target, stage in enumerate(program.stages) for source in stage.arrivals}


def _settings(modules: Sequence[nn.Module], kept: list[Any]) -> Any:
    """Return what a graph of these modules has built in, beside their modes."""
    return tuple(
        (
            tuple([(name, value_key(value, kept)) for name, value in vars(module).items() if name not in OWN]),
            tuple([(name, _kind(tensor)) for name, tensor in (module._buffers | module._parameters).items()]),
        )
        for module in modules
    )


def _table(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Find where the tensor of that name is kept: read anew each time, as moving or loading may replace it."""
    path, _, leaf = name.rpartition(".")
    holder = module.get_submodule(path)
    return (holder._parameters if leaf in holder._parameters else holder._buffers), leaf


def _kind(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype)


class GraphPart(StagePart):
    follows = True
    reads_inputs = True  # inputs are read where they are needed
    captured = True

    def __init__(
        self, index: int, model: nn.Module, programs: GraphPrograms, module: nn.Module, aliases: Mapping[str, str]
    ) -> None:
        super().__init__(index)
        self.module = module
        self.names = Names({name: name for name in all_tensors(module)})
        self.copied = list(model.modules())
        self._programs = programs
        self._is_last = index == programs.topology.stages - 1
        self._tables = {name: _table(module, own) for name, own in aliases.items()}
        holders = dict(model.named_modules(remove_duplicate=False))
        places = [(name, *name.rpartition(".")[::2]) for name, _ in module.named_buffers(remove_duplicate=False)]
        self._buffers = {name: (holders[path], leaf, holders[path]._buffers[leaf]) for name, path, leaf in places}

    def begin(self, settings: Sequence[AttributeChange]) -> None:
        """Take note of what was set since the capture: it needs another one."""
        self.follow(settings)

    def follow(self, changes: Sequence[AttributeChange]) -> None:
        """Put another buffer of the user's model in its place here; other settings need another capture."""
        replaced = False
        for name, (holder, leaf, seen) in self._buffers.items():
            now = holder._buffers.get(leaf)
            if now is not seen:
                table, own = self._tables[name]
                table[own], replaced = now, True
                self._buffers[name] = holder, leaf, now
        if changes or replaced:
            self._programs.follow()
            self.module.train(any(self._programs.modes))

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Run the stage's operations; payloads are lists of tensors and plain values."""
        program, tensors = self._programs.find(self.module.training, args, kwargs)
        stage = program.stages[self.index]
        held = {name: table[leaf] for name, _ in stage.state for table, leaf in [self._tables[name]]}
        sent, results = stage.run(held, tensors, arrived)
        result: dict[int, Any] = {target: [] for target in self._programs.topology.consumers(self.index)} | sent
        if self._is_last:
            result[OUTPUT] = put_together(program.capture.output, results)
        return result
