"""One run of the model on an example, to see which unit call needs what.

Marks (see `marks`) are read at every unit call's arguments and at the final output. What the glue gets of a unit's
output are copies, so that a unit's return value can be told from everything else that it made.

It fails closed. A tensor that was made inside a unit and reaches the glue by another way than the unit's return value
(a loss stashed on a module, a cache that was appended to, an output that a hook collected) has no mark to follow: that
is a leak, and refused. So are units that change what is not theirs, and glue that changes buffers or draws random
numbers from elsewhere than torch, which every stage would do once more; and what is carried from one call of the model
to the next (see `glue_state`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import CPU
from penstock.errors import ModelError, PenstockError, UsageError
from penstock.model.original.placeholders import one_element
from penstock.model.replay.modes import checksum
from penstock.model.replay.plan import check_reentrant
from penstock.model.replay.recording.marks import Reads, fresh
from penstock.model.replay.recording.snapshot import changed_by, own_state, updates_itself
from penstock.model.replay.recording.undo import OutsideChanges, undone
from penstock.model.replay.recording.unit_calls import ForwardRecording, UnitCall, shapes_of, tensors_in
from penstock.model.replay.recording.unit_marks import UnitMarks
from penstock.model.replay.tree import stage_tree
from penstock.model.replay.unit_state.glue_state import GlueState
from penstock.model.replay.unit_state.shared_state import UnitStateFollower
from penstock.model.replay.unit_state.sinks import Sinks, install_collectors
from penstock.model.run_kind import DRY, EVERYWHERE, run_as

Instead = Callable[[str], Callable[..., Any]]


def record(
    model: nn.Module,
    units: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    instead: Instead | None = None,
) -> ForwardRecording:
    """Run the model once, as it is, and put everything back that the run has changed.

    `instead(unit)` may give a forward to run in the place of a unit's own: one that only finds out
    shapes, for models that are not in memory.
    """
    with undone(model), torch.no_grad():
        recorder = _ExampleRun(model, units, instead)
        recording = recorder.record(args, kwargs)
        install = install_collectors(model, recorder.tree)
    install()
    return recording


class _ExampleRun:
    """The model's tree with watched units, and what was seen of it: in one run, or in two where something is kept."""

    def __init__(self, model: nn.Module, units: list[str], instead: Instead | None) -> None:
        self.model = model
        self._instead = instead
        self._modules = dict(model.named_modules())
        self._known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._free = set(_free_leaves(model, units))
        self._elsewhere = OutsideChanges(model)
        self.tree = stage_tree(model, {*units, *self._free}, self._answer, apart=False)
        self._without_memory = {} if instead is None else _stand_in(self.tree)
        self._carried, self._kept = GlueState(self.tree), UnitStateFollower(model, self.tree)
        self._left: list[tuple[str, Tensor]] = []  # made in the first run by units, and there when it was over
        self._marks: UnitMarks

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRecording:
        """Return what one run shows; where the model has kept something, a second run shows whether it reads that."""
        generator = torch.get_rng_state()
        first = self._run(args, kwargs)
        _check_new_parameters(self.model, self.tree, self._known)
        behind = self._carried.left()
        if behind or self._kept.shared():
            self._left = [
                (name, tensor) for name, tensors in behind.items() for tensor in tensors if first.is_of_units(tensor)
            ]
            torch.set_rng_state(generator)
            self._carried.begin_second_run()
            self._run(args, kwargs)
            self._carried.check()
        self._kept.settle(first.recording)
        _warn_of_kept_losses(self.tree, first)
        return first.recording

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitMarks:
        mine, named = pytree.tree_map_only(Tensor, fresh, (args, kwargs))
        marks = UnitMarks(ForwardRecording(), self.model, tensors_in((mine, named)), self._carried.tensors())
        self._marks = marks
        for parameter, standing in self._without_memory.values():
            marks.marks[marks.storages.key(standing)] = marks.of(parameter)
        marks.left = {marks.storages.key(tensor): name for name, tensor in self._left}
        follow, runs = self._kept.follow(marks, self._carried), run_as(EVERYWHERE)
        with follow, Reads(marks.read), marks, _explained(self.model), runs:
            output = self.tree(*mine, **named)
        self._elsewhere.check()
        marks.recording.output = marks.of(output)
        marks.recording.values.append(("", checksum(output), 0))
        self._carried.note_writes(len(marks.recording.calls))
        return marks

    def _answer(self, name: str, own: Callable[..., Any], args: Any, kwargs: Any, by_call: bool) -> Any:
        """Note a call of a unit, or of a layer without parameters between units."""
        marks = self._marks
        if marks.inside is not None or marks.free is not None:
            return own(*args, **kwargs)
        self._elsewhere.check()
        self._carried.note_writes(len(marks.recording.calls))
        with marks.silent():
            given = checksum((args, kwargs))
        if name in self._free:
            output = self._run_free(name, own, args, kwargs)
        else:
            self._kept.pause()
            output, changed = self._run_unit(name, own, args, kwargs)
            self._kept.pause(name, changed)
            self._elsewhere.rest()
        if not marks.recording.calls[-1].glue:
            with marks.silent():
                marks.recording.values.append((name, given, checksum(output)))
        return output

    def _run_unit(self, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[str]]:
        """Run a unit, noted as a call; return its output, and which of its attributes it has changed."""
        marks, module = self._marks, self._modules[name]
        _check_not_mapped(name, (args, kwargs))
        needs, given = marks.of((args, kwargs)), tensors_in((args, kwargs))
        call = UnitCall(name, needs, [], None, shapes_of((args, kwargs), module.training))
        run = own if self._instead is None else self._instead(name)
        unit = _run_by(own, module)
        check_reentrant(name, True)
        marks.check_parameters(name, module)
        sinks = Sinks(args, kwargs)
        marks.enter(name, module)
        with marks.silent():
            before = own_state(unit)
        try:
            with run_as(DRY):
                output = run(*args, **kwargs)
        finally:
            call.needs |= marks.leave(module)
        with marks.silent():
            changed = list(changed_by(unit, before) if self._instead is None else updates_itself(module))
        call.keeps = next(iter(changed), "")
        added = sinks.added()
        if not added:
            return marks.note(call, given, output), changed
        call.adds = True
        output, added = marks.note(call, given, (output, added))
        sinks.put(added)
        return output, changed

    def _run_free(self, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer without parameters: a call if its output depends on units' values or it has a state, else glue.

        Rotary tables, which read no more than the type of what they are given, are so computed by every stage for
        itself, while an activation or a dropout runs where its input is. One that works in place is glue like any
        other in-place operation.
        """
        marks, module = self._marks, self._modules[name]
        needs, given = marks.of((args, kwargs)), tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        buffers = [(buffer, buffer._version) for buffer in module.buffers()]
        unit = _run_by(own, module)
        with marks.silent():
            state = own_state(unit)
        before, known = marks.recording.draws_in_glue, dict(marks.buffers)
        for buffer, _ in buffers:
            marks.buffers.pop(marks.storages.key(buffer), None)
        marks.free = name
        with run_as(DRY):
            output = own(*args, **kwargs)
        marks.buffers, marks.free = known, None
        unchanged = all(tensor._version == version for tensor, version in zip(given, versions, strict=True))
        has_state = any(buffer._version != version for buffer, version in buffers)
        if unchanged and (has_state or marks.of(output) - marks.control):
            marks.recording.draws_in_glue = before
            call = UnitCall(name, needs, [], None, shapes_of((args, kwargs), module.training))
            with marks.silent():
                call.keeps = next(changed_by(unit, state), "")
            return marks.note(call, given, output)
        if has_state:
            raise ModelError(
                f"{name} changes its input in place and has buffers that it updates; pass inplace=False to it"
            )
        marks.recording.calls.append(UnitCall(name, frozenset(), [], None, glue=True))
        return output


def _stand_in(tree: nn.Module) -> dict[int, tuple[nn.Parameter, nn.Parameter]]:
    """Give parameters without memory that the glue may read one element, expanded; return each with its stand-in."""
    found: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    watched = [module for module in tree.modules() if getattr(module, "is_asked", False)]
    inside = {id(inner) for module in watched for inner in module.modules() if inner is not module}
    for module in tree.modules():
        if id(module) in inside:  # the model's own
            continue
        table = dict(module._parameters)
        for name, parameter in table.items():
            if parameter is not None and parameter.is_meta:
                standing = nn.Parameter(one_element(parameter, CPU), requires_grad=parameter.requires_grad)
                table[name] = found.setdefault(id(parameter), (parameter, standing))[1]
        module.__dict__["_parameters"] = table
    return found


def _check_new_parameters(model: nn.Module, tree: nn.Module, known: set[str]) -> None:
    """Refuse parameters that a first forward makes: every stage would make them for itself, and none own them."""
    made = [name for name, _ in tree.named_parameters(remove_duplicate=False) if name not in known]
    if made:
        raise UsageError(
            f"{type(model).__name__} makes parameters in its forward ({', '.join(made[:4])}"
            f"{', ...' if made[4:] else ''}), which no stage would own; run the model once before it is cut"
        )


def _warn_of_kept_losses(tree: nn.Module, marks: UnitMarks) -> None:
    """Warn of a number that a unit keeps on itself: it looks like a loss for others to pick up."""
    found = [
        f"{name}.{attribute}"
        for name, module in tree.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor)
        and value.numel() == 1
        and value.is_floating_point()
        and marks.is_made_inside(value)
    ]
    if found:
        warnings.warn(
            f"a unit keeps a number made in its forward on itself ({', '.join(found[:3])}"
            f"{', ...' if found[3:] else ''}); a loss_fn that reads it there sees an old value, or none. If it is a "
            f"loss, hand it to penstock.add_loss(name, value) in that forward instead, or return it",
            stacklevel=2,
        )


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Explain an error of the model's own code in this run: the example is the first suspect."""
    try:
        yield
    except PenstockError:
        raise
    except NotImplementedError as error:
        if "HigherOrderOperator" in str(error):
            raise _compiles_itself(model) from error
        raise ModelError(
            f"{type(model).__name__} does something that cannot be followed from operation to operation ({error}); let "
            f"one module with parameters do it in its forward, or pass a list of stage modules, which are not looked "
            f"into"
        ) from error
    except Exception as error:
        if "found no compiled frames" in str(error):
            raise _compiles_itself(model) from error
        raise UsageError(
            f"example=: {type(model).__name__} cannot be run on it ({type(error).__name__}: {error}); pass the inputs "
            f"as the model takes them. It is run without gradients: a forward that takes derivatives cannot be cut"
        ) from error


def _compiles_itself(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} uses an operator that compiles itself when it runs (flex attention, torch.cond, a "
        f"scan), which cannot be followed from operation to operation; use another implementation (for transformers "
        f"attn_implementation='sdpa'), or pass a list of stage modules, which are not looked into"
    )


def _check_not_mapped(name: str, values: Any) -> None:
    """Refuse tensors of a function transform, which stand for many and have no memory that could be sent."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors_in(values)):
        raise ModelError(
            f"{name} is called inside of torch.vmap, grad or another function transform, whose tensors cannot be sent "
            f"to another stage; call it on the whole batch, or put a module in its place that has it inside and does "
            f"the same in its own forward, such as torch.vmap(self.inner)(x)"
        )


def _free_leaves(model: nn.Module, units: list[str]) -> list[str]:
    """Return the modules without parameters and children outside of units: activations, dropout, pooling."""
    inside = tuple(f"{unit}." for unit in units)
    return [
        name
        for name, module in model.named_modules()
        if name
        and name not in units
        and not name.startswith(inside)
        and next(module.children(), None) is None
        and next(module.parameters(), None) is None
        and not isinstance(module, torch.jit.ScriptModule)
        and type(module).forward is not nn.Module.forward
        and not isinstance(module, nn.Identity)
    ]


def _run_by(own: Callable[..., Any], module: nn.Module) -> nn.Module:
    return own.args[0] if isinstance(own, functools.partial) else module
