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

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.lru_cache import LruCache
from penstock.model.names import dotted_name
from penstock.model.original.placeholders import is_away, stand_ins
from penstock.model.original.settings import AttributeChange, ModuleSettings
from penstock.model.part import OUTPUT, WHOLE_MODEL, Names, StagePart, state_names
from penstock.model.replay.plan import GLUE, StagePlan, cannot_repeat, check_reentrant, check_returned, diverged, stale
from penstock.model.replay.recording.marks import Absent
from penstock.model.replay.recording.unit_calls import Leaf, Mark, flatten, shapes_of, tensors_in, unflatten
from penstock.model.replay.shapes import Shapes, stand_in
from penstock.model.replay.tree import GlueTensors, StageUnits, Twins, stage_tree
from penstock.model.replay.unit_state.shared_state import Guard
from penstock.model.replay.unit_state.sinks import Sinks
from penstock.model.run_kind import EVERYWHERE, run_as


class _PassEnded(BaseException):
    """Ends a forward whose rest is of no use to this stage. No `except Exception` may stop it."""


class _Replay:
    """One microbatch on its way through the model's forward."""

    __slots__ = ("absent", "arrived", "checkpoint", "emitted", "inside", "number", "with_gradients")

    def __init__(self, arrived: dict[Mark, Tensor], absent: Absent | None) -> None:
        self.arrived = arrived
        self.absent = absent  # follows stand-ins, where the plan may not hold for this microbatch
        self.emitted: dict[Mark, Any] = {}
        self.number = 0
        self.inside = False  # a unit of this stage runs
        self.with_gradients = torch.is_grad_enabled()
        self.checkpoint: Callable[..., Any] | None = None  # around the unit call that comes

    def not_followed(self) -> AbstractContextManager[Any]:
        """Let what runs inside do with stand-ins what it likes."""
        return nullcontext() if self.absent is None else self.absent.paused()


class ReplayPart(StagePart):
    follows = True
    reads_inputs = True  # The glue may read any of them.

    def __init__(
        self,
        index: int,
        model: nn.Module,
        plan: StagePlan,
        shapes: Shapes,
        owned: list[str],
        loose: dict[str, Tensor],
        defaults: Mapping[str, Any],
    ) -> None:
        super().__init__(index)
        self.stream = WHOLE_MODEL
        self._model, self._plan, self._shapes = model, plan, shapes
        self._defaults = dict(defaults)
        self._is_last = index == plan.stages - 1
        self._local = threading.local()
        watched = {call.unit for call in plan.recording.calls}
        self._root = stage_tree(model, watched, self._answer)
        twins: dict[str, Any] = dict(self._root.named_modules())
        for module in twins.values():
            if not getattr(module, "is_asked", False):
                for name, value in module.__dict__.items():
                    module.__dict__[name] = self._between(module, name, value)
        self._always_follow = plan.recording.reads_values or plan.recording.draws_in_glue
        self._followed: LruCache[bool] = LruCache()  # kinds of microbatches for which the plan has been seen to hold
        self.filling = 0.0  # Fills stand-ins; a check fills them with what must not matter.
        modules = dict(model.named_modules())
        units = {name: modules[name] for name in owned}
        self._twins = Twins(model, self._root, units.values())
        self.copied = self._twins.glue
        self._modes_of: dict[str, Any] = {name: twins.get(name, module) for name, module in modules.items()}
        inside = {id(module) for unit in units.values() for module in unit.modules()}
        others = [module for module in self._root.modules() if id(module) not in inside]
        self._modes = [module for module in others if not getattr(module, "is_asked", False)]
        self._guarded = [*self.copied, *(twins[call.unit] for call in plan.recording.calls if call.glue)]
        self.units = list(units)
        running = [twins.get(name, unit) for name, unit in units.items()]
        guarded = plan.recording.guarded
        self._guards = {name: Guard(name, twins[name], guarded[name]) for name in units if name in guarded}
        self.module = StageUnits(list(units.values()), list(loose.values()), others, running)
        self._outside = GlueTensors(self._root, self.module)
        known = {
            f"{number}.{name}": dotted_name(unit, name)
            for number, (unit, module) in enumerate(units.items())
            for name in state_names(module)
        }
        known.update({f"loose_{number}": name for number, name in enumerate(loose)})
        self.names = Names(known, within={str(number): unit for number, unit in enumerate(units)})
        own = [number for number, stage in enumerate(plan.stage_of) if stage == index]
        self._last_own = own[-1] if own else -1
        self._sent = {mark for (source, _), marks in plan.crossing.items() if source == index for mark in marks}
        self._in = {source: marks for (source, target), marks in plan.crossing.items() if target == index}
        self._out = {target: marks for (source, target), marks in plan.crossing.items() if source == index}

    def reads(self) -> Iterable[Tensor]:
        """Return the buffers of the code between units, which every stage runs, and what it has read of units."""
        found = [buffer for module in self.module.__dict__["_glue"] for buffer in module._buffers.values()]
        for unit, places in self._plan.recording.guarded.items():
            inner = dict(self._model.get_submodule(unit).named_modules())
            found += [inner[holder]._buffers.get(attribute) for holder, attribute in places]
        return [buffer for buffer in found if buffer is not None]

    def settle(self) -> None:
        """Look at the plan once more: it has to hold without the values of other stages."""
        self._followed.clear()

    def before_sharding(self) -> None:
        """Note what units return while parameters are whole; the parts of one model share that."""
        self._shapes.keep()

    def poison(self) -> bool:
        """Let NaN stand for the outputs of other stages' units."""
        self.filling = float("nan")
        return True

    def follow(self, changes: Sequence[AttributeChange]) -> None:
        """Set on the copies what was set on the user's modules; take over buffers that the user replaced."""
        self.begin(changes)
        if changes:
            self._shapes.forget()

    def begin(self, settings: Sequence[AttributeChange]) -> None:
        """Follow settings before the first step; what units return for the example is still known."""
        self._outside.follow_buffers()
        if settings:
            self._twins.follow(settings, self._between)
            self._followed.clear()

    def fault(self) -> str:
        """Name a mode in which the model's forward was not looked at, and which may need another plan."""
        untried = self._plan.recording.untried
        if untried is None or not any(module.training for module in untried.modules):
            return ""
        return (
            f"modules are in training mode that were in eval mode when the model was cut, and its forward could not be "
            f"looked at in training mode then ({untried.reason})"
        )

    def give_back(self, settings: ModuleSettings) -> None:
        self._twins.give_back(settings)

    def _between(self, module: nn.Module, name: str, value: Any) -> Any:
        """Return what the code between units gets in the place of an attribute of the user's."""
        if name == "_gradient_checkpointing_func" and value is not None:
            return self._checkpointed(value)
        if name == "use_nested_tensor" and isinstance(module, nn.TransformerEncoder):
            return False  # What it hands on in eval mode would have no shape.
        return value

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Replay the forward; payloads are lists of tensors, in the plan's order of marks."""
        received = {
            mark: tensor
            for source, marks in self._in.items()
            for mark, tensor in zip(marks, arrived[source], strict=True)
        }
        kwargs = {**self._defaults, **kwargs}
        self._outside.follow_parameters()
        kind = self._kind(args, kwargs)
        follow = self._always_follow or (not self._followed.get(kind) and not self.filling)  # a check looks by itself
        run = self._local.run = _Replay(received, Absent(stale) if follow else None)
        stand_ins.add = None if run.absent is None else run.absent.add
        if self._plan.recording.writes_inputs:
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        elif run.absent is not None:
            run.absent.guard(tensors_in((args, kwargs)), "the model's input")
        if run.absent is not None:
            for module in self._guarded:
                here = [buffer for buffer in module._buffers.values() if not is_away(buffer)]
                run.absent.guard(here, f"a buffer of {type(module).__name__}")
        result: dict[int, Any] = {}
        try:
            with run.absent or nullcontext(), run_as(EVERYWHERE):
                output = self._root(*args, **kwargs)
            if not self._is_last or run.number != len(self._plan.recording.calls):
                raise self._diverged("the forward ended", run.number)
            if run.absent is not None and run.absent.touches(output):
                raise stale("the output needs a value that it did not need with the example")
            result[OUTPUT] = output
        except _PassEnded:
            pass
        finally:
            self._local.run = None
        for target, marks in self._out.items():
            result[target] = [run.emitted[mark] for mark in marks]
        if run.absent is None or not run.absent.decides:
            self._followed.put(kind, True)
        return result

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return all that the model's code can see of a microbatch without reading a tensor: it may decide the path."""
        modes = tuple([module.training for module in self._modes])
        return shapes_of((args, dict(kwargs)), (modes, torch.is_grad_enabled()))

    def _answer(self, name: str, own: Callable[..., Any], args: Any, kwargs: dict[str, Any], by_call: bool) -> Any:
        run: _Replay | None = getattr(self._local, "run", None)
        if run is None:
            return self._rerun_in_backward(name, own, args, kwargs, by_call)
        if run.inside:
            return own(*args, **kwargs)
        number, calls = run.number, self._plan.recording.calls
        run.number += 1
        if number >= len(calls) or calls[number].unit != name:
            raise self._diverged(f"{name} was called", number)
        stage = self._plan.stage_of[number]
        if stage == GLUE:
            run.inside = True
            try:
                return own(*args, **kwargs)
            finally:
                run.inside = False
        if stage == self.index:
            return self._own(run, number, own, args, kwargs)
        return self._ghost(run, number, args, kwargs)

    def _rerun_in_backward(self, name: str, own: Callable[..., Any], args: Any, kwargs: Any, by_call: bool) -> Any:
        """Run a unit again in the backward, because it checkpoints itself or the model's code checkpoints its call."""
        if not by_call:
            return own(*args, **kwargs)
        numbers = [number for number, call in enumerate(self._plan.recording.calls) if call.unit == name]
        stages = {self._plan.stage_of[number] for number in numbers}
        if stages == {GLUE}:
            return own(*args, **kwargs)
        if stages != {self.index} or len(numbers) > 1:  # Nothing says which of its calls it is.
            raise cannot_repeat(name)
        with self.around(numbers[0]):
            return own(*args, **kwargs)

    def _own(self, run: _Replay, number: int, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = self._plan.recording.calls[number]
        if run.absent is not None and run.absent.touches((args, kwargs)):
            raise stale(f"{call.unit} needs a value that it did not need with the example")
        check_reentrant(call.unit, run.with_gradients)
        if run.checkpoint is not None:
            own = functools.partial(run.checkpoint, own)
        guard = self._guards.get(call.unit)
        guarded = [] if guard is None else guard.values()
        expected = None if self._is_last else self._shapes_of(run, number, args, kwargs)
        sinks = Sinks(args, kwargs) if call.adds or run.absent is not None else None
        run.inside = True
        try:
            with self.around(number), run.not_followed(), run_as(None):
                output = own(*args, **kwargs)
        finally:
            run.inside = False
        if guard is not None:
            guard.check(guarded)
        if sinks is not None and not call.adds and sinks.added():
            raise stale(f"{call.unit} adds to a list that it left alone with the example")
        leaves, spec = flatten((output, sinks.added()) if sinks is not None and call.adds else output)
        if expected is not None:
            check_returned(self._plan.recording.calls, number, leaves, spec, *expected)
        for place, leaf in enumerate(leaves):
            if (number, place) in self._sent:
                run.emitted[number, place] = leaf
                if run.absent is not None and not call.changed_in_place:
                    run.absent.guard([leaf], f"what {call.unit} returned")
        if number == self._last_own and not self._is_last:
            raise _PassEnded
        if not call.changed_in_place:
            return output
        # the glue writes into it: what was emitted must stay as it is
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._handed(number, unflatten(leaves, spec), sinks)

    def _ghost(self, run: _Replay, number: int, args: Any, kwargs: Any) -> Any:
        call = self._plan.recording.calls[number]
        known, spec = self._shapes_of(run, number, args, kwargs)
        leaves: list[Any] = []
        for place, leaf in enumerate(known):
            if not isinstance(leaf, Leaf):
                leaves.append(leaf)
            elif (number, place) in run.arrived:
                value = run.arrived[number, place]
                leaves.append(value.clone() if call.changed_in_place else value)
            else:
                leaves.append(stand_in(leaf, call.changed_in_place, self.filling))
                if run.absent is not None:
                    run.absent.add(leaves[-1:])
        return self._handed(number, unflatten(leaves, spec), Sinks(args, kwargs) if call.adds else None)

    def _shapes_of(self, run: _Replay, number: int, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Return what a call returns for such arguments; to find out, the unit may have to run."""
        call = self._plan.recording.calls[number]
        with run.not_followed():
            return self._shapes.of(number, call, args, kwargs, self._modes_of[call.unit].training)

    def _handed(self, number: int, value: Any, sinks: Sinks | None) -> Any:
        """Return what the model's code gets of a call: the output, and in its lists what belongs there."""
        if not self._plan.recording.calls[number].adds or sinks is None:
            return value
        output, added = value
        if not sinks.put(added):
            raise self._diverged("a list was missing that the call adds to", number)
        return output

    def _checkpointed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Move a checkpoint of the model's code around a unit's call into the call, around the unit only."""

        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run: _Replay = self._local.run
            before, run.checkpoint = run.checkpoint, original
            try:
                return function(*args, **kwargs)
            finally:
                run.checkpoint = before

        return checkpointed

    def _diverged(self, what: str, number: int) -> ModelError:
        return diverged(self._plan.recording.calls, what, number)
