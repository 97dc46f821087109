"""One stage of a captured model, as the runtime sees it.

The stage's module has no forward: it holds the parameters and buffers that the stage's graph
reads, the user's own objects under their own names, and its training flag says which capture is
run. A capture for the other mode, or for sizes that the first does not hold for, is made when it
is first needed, and cut in the same places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.away import with_memory
from penstock.model.graph.capture import Capture, capture
from penstock.model.graph.places import Cut, find_cuts
from penstock.model.graph.stages import StageGraph, build_stages
from penstock.model.graph.structure import Arguments, is_channels_last, put_together, settled, take_apart
from penstock.model.graph.values import Values
from penstock.model.split import OUTPUT
from penstock.schedule.topology import Topology

__all__ = ["GraphPart", "Program", "Programs", "StageState", "all_tensors"]

MOST_CAPTURES = 16  # of one mode: one that changes at every step would capture for ever


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by every name that it has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _autocast() -> Any:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@dataclass(frozen=True)
class Program:
    """A capture and its stages."""

    capture: Capture
    stages: list[StageGraph]
    autocast: Any = field(default_factory=_autocast)  # under which it was captured: its types are in the graph


class Programs:
    """The captures of one model, shared by its parts."""

    def __init__(self, model: nn.Module, arguments: Arguments, cuts: Sequence[Cut], first: Program) -> None:
        self._model = model
        self._arguments = arguments
        self._cuts = cuts
        self._mode = model.training
        self._made: dict[bool, list[Program]] = {model.training: [first], not model.training: []}
        self._known: dict[Any, Program] = {}
        self._lock = threading.Lock()
        self.topology = Topology(len(first.stages), _edges(first))
        self.held: list[set[str]] = []  # by stage: the names of what it holds

    def find(self, training: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Program, list[Any]]:
        """The program for these inputs, and their tensors."""
        tensors: list[Any] = []
        plain = take_apart(self._arguments.named(args, kwargs), "input", tensors).key()
        tensors = [settled(tensor) for tensor in tensors]
        sizes = tuple((tensor.shape, tensor.dtype, tensor.device, is_channels_last(tensor)) for tensor in tensors)
        key = (training, plain, sizes, _autocast())
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._known[key] = self._find(training, plain, tensors, args, kwargs)
        return known, tensors

    def _find(self, training: bool, plain: Any, tensors: list[Any], args: Any, kwargs: Any) -> Program:
        reasons = []
        for program in self._made[training]:
            if program.capture.key != plain:
                reason: str | None = "other inputs, or other plain values among them"
            elif program.autocast != _autocast():
                reason = "another state of torch.autocast"
            else:
                reason = program.capture.misfit(tensors)
            if reason is None:
                return program
            reasons.append(reason)
        if len(reasons) >= MOST_CAPTURES:
            raise ModelError(
                f"the model was captured {len(reasons)} times and none fits this microbatch: it has {reasons[-1]}; "
                f"pad the inputs to a few shapes, or pass a list of stage modules"
            )
        with _mode(self._model, training, self._mode), with_memory(self._model):
            made = capture(self._model, self._arguments, args, kwargs)
        values = Values(made)
        tensors_of = all_tensors(self._model)
        program = Program(made, build_stages(values, find_cuts(values, tensors_of, self._cuts)))
        self._check(program, tensors_of, "training" if training else "evaluation", reasons)
        self._made[training].append(program)
        return program

    def _check(self, program: Program, tensors: dict[str, Tensor], mode: str, reasons: list[str]) -> None:
        """The stages must need nothing that was not arranged at the first capture."""
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


@contextmanager
def _mode(model: nn.Module, training: bool, usual: bool) -> Iterator[None]:
    """The model in the mode that it had when it was split, module by module, or all of it in the other."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if training != usual or model.training != usual:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class StageState(nn.Module):
    """What a stage holds, in a tree of the same names as in the whole model."""

    def __init__(self) -> None:
        super().__init__()

    def take(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Hold a parameter or buffer: the object itself, not a copy."""
        *path, leaf = name.split(".")
        place: nn.Module = self
        for step in path:
            inner = place._modules.get(step)
            if inner is None:
                inner = place._modules[step] = StageState()
            place = inner
        if isinstance(tensor, nn.Parameter):
            place._parameters[leaf] = tensor
        else:
            place._buffers[leaf] = tensor
            if not persistent:
                place._non_persistent_buffers_set.add(leaf)

    def table(self, name: str) -> tuple[dict[str, Any], str]:
        """Where the tensor of that name is kept: read anew each time, as moving or loading may replace it."""
        *path, leaf = name.split(".")
        place: nn.Module = self
        for step in path:
            found = place._modules[step]
            assert found is not None
            place = found
        return (place._parameters if leaf in place._parameters else place._buffers), leaf


class GraphPart:
    """A stage, as the runtime sees it."""

    takes: frozenset[str] | None = None  # every keyword argument
    whole_batch = True  # and all positional ones: inputs are read where they are needed

    def __init__(self, index: int, programs: Programs, module: StageState, aliases: Mapping[str, str]) -> None:
        self.index = self.stream = index
        self.module: nn.Module = module
        self.names = {name: name for name in all_tensors(module)}  # of the module -> of the whole model
        self.around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext()
        self._programs = programs
        self._is_last = index == programs.topology.stages - 1
        self._tables = {name: module.table(own) for name, own in aliases.items()}  # by every name that a tensor has

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Run the stage's operations; payloads are lists of tensors and plain values."""
        program, tensors = self._programs.find(self.module.training, args, kwargs)
        stage = program.stages[self.index]
        values = [
            *(table[leaf] for table, leaf in (self._tables[name] for name, _ in stage.state)),
            *stage.constants,
            *(tensors[number] for number in stage.inputs),
            *(value for source in stage.arrivals for value in arrived[source]),
        ]
        found = stage.function.forward(*values)
        result: dict[int, Any] = {target: [] for target in self._programs.topology.consumers(self.index)}
        place = 0
        for target, count in stage.departures.items():
            result[target] = list(found[place : place + count])
            place += count
        if self._is_last:
            result[OUTPUT] = put_together(program.capture.output, found[place:])
        return result

    def reads(self) -> Iterable[Tensor]:
        """Nothing: the module has all that the graph reads."""
        return ()

    def settle(self) -> None:
        """Nothing of it depends on other stages' values; a new capture looks at shapes."""
