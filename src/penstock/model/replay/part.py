"""One stage of a replayed model: the model's own forward, with ghosts for other stages' calls.

Each unit call is answered in one of three ways, by its number in call order:

    own      the unit runs; what other stages need of its output is emitted
    needed   the value that was received is returned, a leaf that wants a gradient
    other    a stand-in of the right shape and type is returned: one element, expanded

After the stage's last own call nothing of the forward matters any more and it is abandoned,
but for the last stage, which returns the model's output. A call that is not the one that the
plan has at this place means that the model took another path than with the example: that is
an error, never a guess.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.part import OUTPUT, WHOLE, no_stream
from penstock.model.replay.plan import GLUE, Plan
from penstock.model.replay.record import Leaf, Mark
from penstock.model.replay.shapes import Shapes, stand_in
from penstock.model.replay.tree import stage_tree

__all__ = ["ReplayPart", "StageUnits"]


class _Abandoned(BaseException):
    """The rest of the forward is of no use to this stage. No `except Exception` may stop it."""


class StageUnits(nn.Module):
    """The units that a stage owns, as one module: what is trained, moved, saved."""

    def __init__(self, units: list[nn.Module], loose: list[Tensor], others: list[nn.Module]) -> None:
        super().__init__()
        for number, unit in enumerate(units):
            self.add_module(str(number), unit)
        for number, tensor in enumerate(loose):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"loose_{number}", tensor)
            else:
                self.register_buffer(f"loose_{number}", tensor)
        self.__dict__["_others"] = others  # containers and glue modules of the stage's tree

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Also those of the tree that hold no parameter: they too know whether they are training."""
        yield from super().modules(remove_duplicate)
        yield from self.__dict__["_others"]

    def train(self, mode: bool = True) -> StageUnits:
        super().train(mode)
        for module in self.__dict__["_others"]:
            module.training = mode
        return self


class _Run:
    """One microbatch on its way through the model's forward."""

    __slots__ = ("arrived", "emitted", "number")

    def __init__(self, arrived: dict[Mark, Tensor]) -> None:
        self.arrived = arrived
        self.emitted: dict[Mark, Any] = {}
        self.number = 0


class ReplayPart:
    """A stage, as the runtime sees it."""

    takes: frozenset[str] | None = None  # every keyword argument: the glue may read any of them
    whole_batch = True  # and all positional ones
    stream = WHOLE

    def __init__(
        self,
        index: int,
        model: nn.Module,
        plan: Plan,
        shapes: Shapes,
        owned: list[str],
        loose: dict[str, Tensor],
        defaults: Mapping[str, Any],
    ) -> None:
        self.index = index
        self._plan = plan
        self._shapes = shapes
        self._defaults = dict(defaults)
        self._is_last = index == plan.stages - 1
        self._local = threading.local()
        self.around: Callable[[int], AbstractContextManager[Any]] = no_stream
        watched = {call.unit for call in plan.recording.calls}
        self._root = stage_tree(model, watched, self._answer)
        modules = dict(model.named_modules())
        units = {name: modules[name] for name in owned}
        inside = {id(module) for unit in units.values() for module in unit.modules()}
        others = [module for module in self._root.modules() if id(module) not in inside]
        self.units = list(units)
        self.module: nn.Module = StageUnits(list(units.values()), list(loose.values()), others)
        self.names = {
            f"{number}.{name}": f"{unit}.{name}" if unit else name
            for number, (unit, module) in enumerate(units.items())
            for name in _state_names(module)
        }
        self.names.update({f"loose_{number}": name for number, name in enumerate(loose)})
        own = [number for number, stage in enumerate(plan.stage_of) if stage == index]
        self._last_own = own[-1] if own else -1
        self._wanted = {mark for (source, _), marks in plan.crossing.items() if source == index for mark in marks}
        self._in = {source: marks for (source, target), marks in plan.crossing.items() if target == index}
        self._out = {target: marks for (source, target), marks in plan.crossing.items() if source == index}

    def settle(self) -> None:
        """Once this process's parameters have values: those that it will never have get stand-ins.

        Glue reads types and devices off parameters (`self.head.weight.dtype`); one element on a real
        device, expanded, answers that.
        """
        home = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        for module in self._root.modules():
            table = module._parameters
            if any(parameter is not None and parameter.device.type == "meta" for parameter in table.values()):
                module.__dict__["_parameters"] = {
                    name: _stand_in_parameter(parameter, home) for name, parameter in table.items()
                }

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Replay the forward; payloads are lists of tensors, in the plan's order of marks."""
        received = {
            mark: tensor
            for source, marks in self._in.items()
            for mark, tensor in zip(marks, arrived[source], strict=True)
        }
        run = self._local.run = _Run(received)
        result: dict[int, Any] = {}
        try:
            output = self._root(*args, **{**self._defaults, **kwargs})
            if not self._is_last:
                raise self._diverged("the forward ended", run.number)
            if run.number != len(self._plan.recording.calls):
                raise self._diverged("the forward ended", run.number)
            result[OUTPUT] = output
        except _Abandoned:
            pass
        finally:
            self._local.run = None
        for target, marks in self._out.items():
            result[target] = [run.emitted[mark] for mark in marks]
        return result

    def _answer(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: _Run = self._local.run
        number, calls = run.number, self._plan.recording.calls
        run.number += 1
        if number >= len(calls) or calls[number].unit != name:
            raise self._diverged(f"{name} was called", number)
        stage = self._plan.stage_of[number]
        if stage == GLUE:
            return forward(*args, **kwargs)
        if stage == self.index:
            return self._own(run, number, forward, args, kwargs)
        return self._ghost(run, number, args, kwargs)

    def _own(self, run: _Run, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = self._plan.recording.calls[number]
        with self.around(number):
            output = forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(output)
        if len(leaves) != len(call.leaves):
            raise self._diverged(f"{call.unit} returned {len(leaves)} values instead of {len(call.leaves)}", number)
        for place, leaf in enumerate(leaves):
            if (number, place) in self._wanted:
                run.emitted[number, place] = leaf
        if number == self._last_own and not self._is_last:
            raise _Abandoned
        if not call.changed_in_place:
            return output
        # the glue writes into it: what was emitted must stay as it is
        return pytree.tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def _ghost(self, run: _Run, number: int, args: Any, kwargs: Any) -> Any:
        call = self._plan.recording.calls[number]
        known, spec = self._shapes.of(number, call, args, kwargs)
        leaves: list[Any] = []
        for place, leaf in enumerate(known):
            if not isinstance(leaf, Leaf):
                leaves.append(leaf)
            elif (number, place) in run.arrived:
                value = run.arrived[number, place]
                leaves.append(value.clone() if call.changed_in_place else value)
            else:
                leaves.append(stand_in(leaf, call.changed_in_place))
        return pytree.tree_unflatten(leaves, spec)

    def _diverged(self, what: str, number: int) -> ModelError:
        calls = self._plan.recording.calls
        due = f"{calls[number].unit} was due" if number < len(calls) else "no further call was due"
        return ModelError(
            f"the model took another path than with the example: as call {number}, {what}, where {due}. Its control "
            f"flow depends on the data; make the part that decides one unit, or pass a list of stage modules"
        )


def _stand_in_parameter(parameter: nn.Parameter | None, device: torch.device) -> nn.Parameter | None:
    if parameter is None or parameter.device.type != "meta":
        return parameter
    empty = stand_in(Leaf(tuple(parameter.shape), parameter.dtype, device), writable=False)
    return nn.Parameter(empty, requires_grad=False)


def _state_names(module: nn.Module) -> list[str]:
    found = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return found + [name for name, _ in module.named_buffers(remove_duplicate=False)]
