"""What a unit keeps on itself from call to call, and who else reads it.

A counter, a moving average or a list that a unit changes in its forward is right where the unit runs; code on another
stage that reads it would see what it was at the start, or on threads what it happens to be. So every access to
attributes is followed while the example runs. What one unit keeps and others read is one more thing that they need of
it. It cannot be sent, because a read before the unit's call means the value of the microbatch before: the plan has
writer and readers on one stage, or refuses.

Tensors are followed by marks. Of numbers and containers nothing tells what becomes of them: all that comes after the
read depends on them. What is written in the first of two runs only is a cache, and no state. And what others read may
not change in training where it did not with the example (`Guard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.original.settings import OWN
from penstock.model.replay.recording.snapshot import CONTAINERS, PLAIN, changes_in_place, frozen, watch_access
from penstock.model.replay.recording.unit_calls import STATE, ForwardRecording, KeptState, Mark, tensors_in
from penstock.model.replay.recording.unit_marks import UnitMarks
from penstock.model.replay.unit_state.glue_state import GlueState

StateKey = tuple[str, str] | int  # a module's name and an attribute of it; of what changes in place, its identity


class Access(NamedTuple):
    """One read or write of an attribute, or of what it holds."""

    who: str | None  # the unit in whose call it was; None: the code between them
    position: int  # how many calls came before
    holder: str  # the module that has the attribute
    copy: int  # Which copy of that module; 0: the one that runs.


class _AccessLog:
    """All reads and writes of attributes in one run of the example."""

    def __init__(self, marks: UnitMarks) -> None:
        self.marks = marks
        self.reads: dict[StateKey, set[Access]] = {}
        self.writes: dict[StateKey, set[Access]] = {}
        self.states: list[StateKey] = []  # What (STATE, number) stands for, where it is a tensor.
        self.names: dict[int, str] = {}
        self.touched: dict[int, tuple[Any, Any, Access]] = {}  # containers, since a unit was last called or returned

    def name(self, key: StateKey) -> str:
        return self.names[key] if isinstance(key, int) else dotted_name(*key)

    def writers(self, key: StateKey) -> set[str]:
        return {access.who for access in self.writes.get(key, ()) if access.who is not None}

    def outside(self, key: StateKey) -> list[Access]:
        """Return the reads by others than the one unit that writes it."""
        writers = self.writers(key)
        return [access for access in self.reads.get(key, ()) if {access.who} != writers]

    def needs(self, unit: str | None, marks: Iterable[Mark]) -> Iterator[StateKey]:
        """Yield the kept tensors among what a unit call, or the output, needs of others."""
        for kind, number in marks:
            if kind == STATE and self.writers(self.states[number]) != {unit}:
                yield self.states[number]


class UnitStateFollower:
    """Follows what units keep, through the runs of a recording."""

    def __init__(self, model: nn.Module, tree: nn.Module) -> None:
        first = {id(module): name for name, module in model.named_modules()}
        twins = dict(tree.named_modules(remove_duplicate=False))
        self._names = dict(first)  # what hangs in the tree twice has one
        for name, module in model.named_modules(remove_duplicate=False):
            if name in twins:
                self._names.setdefault(id(twins[name]), first[id(module)])
        self._modules = list({id(each): each for each in [*twins.values(), *model.modules()]}.values())
        asked = {name: twin for name, twin in twins.items() if getattr(type(twin), "is_asked", False)}
        self._unit_of = {self._names[id(inner)]: name for name, twin in asked.items() for inner in twin.modules()}
        self._logs: list[_AccessLog] = []
        self._held: list[Any] = []

    @contextmanager
    def follow(self, marks: UnitMarks, carried: GlueState) -> Iterator[None]:
        log = _AccessLog(marks)
        self._logs.append(log)
        for module in self._modules:
            holder = self._names[id(module)]
            values = {**vars(module), **module._buffers} if holder in self._unit_of else {}
            for name, value in values.items():
                for tensor in tensors_in(value, 1) if name not in OWN else ():
                    marks.put(tensor, (STATE, len(log.states)))
                    log.states.append((holder, name))

        def on_access(module: nn.Module, name: str, written: bool) -> None:
            if not marks.quiet and id(module) in self._names:  # A copy that was made of one is none of them.
                self._note(log, module, name, written)
                if not written:
                    carried.read(module, name, len(marks.recording.calls))

        with watch_access(self._modules, on_access):
            yield
        self.pause()
        for storage, units in marks.written_by.items():
            for kind, number in marks.marks.get(storage, ()):
                for unit in units if kind == STATE else ():
                    log.writes.setdefault(log.states[number], set()).add(Access(unit, 0, unit, 0))

    def _note(self, log: _AccessLog, module: nn.Module, name: str, written: bool) -> None:
        marks = log.marks
        who = marks.inside if marks.inside is not None else marks.free
        access = Access(who, len(marks.recording.calls), self._names[id(module)], id(module))
        (log.writes if written else log.reads).setdefault((access.holder, name), set()).add(access)
        value = vars(module).get(name)
        if not written and changes_in_place(value):
            log.reads.setdefault(id(value), set()).add(access)
            log.names.setdefault(id(value), log.name((access.holder, name)))
            if id(value) not in log.touched:
                self._held.append(value)  # The number is its own while it lives.
                log.touched[id(value)] = (value, frozen(value), access)

    def pause(self, unit: str = "", changed: Iterable[str] = ()) -> None:
        """Note what has changed as a unit is about to run, or has run: whoever ran may have filled lists."""
        log = self._logs[-1]
        for value, before, access in log.touched.values():
            if frozen(value) != before:
                log.writes.setdefault(id(value), set()).add(access)
        log.touched.clear()
        for name in changed:
            holder, _, attribute = dotted_name(unit, name).rpartition(".")
            log.writes.setdefault((holder, attribute), set()).add(Access(unit, 0, holder, 0))

    def shared(self) -> list[StateKey]:
        """Return what the first run has written and others read; if anything, a second one tells state from caches."""
        log = self._logs[0]
        recording = log.marks.recording
        used = set(log.needs(None, recording.output))
        used.update(key for call in recording.calls for key in log.needs(call.unit, call.needs))
        return [key for key in log.writes if log.writers(key) and (key in used or log.outside(key))]

    def settle(self, recording: ForwardRecording) -> None:
        """Put what is shared into the recording, after all runs, or refuse it."""
        log = self._logs[0]
        everywhere = {call.unit for call in recording.calls if call.glue}
        moving = [key for key in self.shared() if all(each.writers(key) for each in self._logs)]
        marks: dict[StateKey, Mark] = {}
        for key in moving:
            _check_copies(log, key)
            if log.writers(key) <= everywhere:
                _check_order(log, recording, key)
            else:
                marks[key] = (STATE, len(recording.states))
                recording.states.append(KeptState(log.name(key), frozenset(log.writers(key))))
        tensors = set(log.states)
        plain = {key: mark for key, mark in marks.items() if key not in tensors}

        def resolved(needs: frozenset[Mark], unit: str | None, position: int) -> frozenset[Mark]:
            kept = {marks[key] for key in log.needs(unit, needs) if key in marks}
            for key, mark in plain.items():
                for read in log.outside(key):
                    between = read.who is None or read.who in everywhere
                    if position >= read.position if between else position == read.position:
                        kept.add(mark)
            return frozenset(mark for mark in needs if mark[0] != STATE) | kept

        for number, call in enumerate(recording.calls):
            call.needs = resolved(call.needs, call.unit, number)
        recording.output = resolved(recording.output, None, len(recording.calls))
        self._check_glue(log)
        self._guard(log, recording, set(moving))

    def _check_glue(self, log: _AccessLog) -> None:
        """Let the code between units set a unit's own attributes, which it does on every stage, and no inner ones."""
        for key, writes in log.writes.items():
            unit = self._unit_of.get(min(writes).holder) if all(write.who is None for write in writes) else None
            if unit is None:
                continue
            if isinstance(key, int) or key[0] != unit:
                raise ModelError(
                    f"the code between the units changes {log.name(key)}, inside of {unit}, which stages on other "
                    f"threads may be running; set an attribute of {unit} itself, or pass it as an argument"
                )
            if any(read.position < min(write.position for write in writes) for read in log.reads.get(key, ())):
                raise ModelError(
                    f"the code between the units keeps {log.name(key)} from one call of the model to the next; stages "
                    f"end at their last unit and would not all see what it was set to. Let {unit} keep it in its own "
                    f"forward, or pass it in as an input"
                )

    def _guard(self, log: _AccessLog, recording: ForwardRecording, moving: set[StateKey]) -> None:
        """Have guarded what others read of a unit that has left it alone."""
        known = {log.name(key) for key in moving}
        called = {call.unit for call in recording.calls if not call.glue}
        for key, reads in log.reads.items():
            unit = "" if isinstance(key, int) else self._unit_of.get(key[0], "")
            if isinstance(key, int) or unit not in called or log.name(key) in known:
                continue
            by_glue = any(write.who is None for write in log.writes.get(key, ()))
            if not by_glue and any(read.who != unit for read in reads):
                inner = key[0][len(unit) :].lstrip(".")
                recording.guarded.setdefault(unit, []).append((inner, key[1]))


def _check_copies(log: _AccessLog, key: StateKey) -> None:
    """Refuse to reach the attributes of a unit in a way that does not see those of the copy that runs."""
    for read in sorted(log.outside(key), key=lambda read: read.position):
        for write in sorted(log.writes[key], key=lambda write: write.who or ""):
            if write.who in (None, read.who):
                continue
            within = not write.who or f"{read.holder}.".startswith(f"{write.who}.")
            if not within or (write.copy and read.copy != write.copy):
                reader = "the code between the units" if read.who is None else read.who
                raise ModelError(
                    f"{write.who} changes {log.name(key)} in its forward, and {reader} reads it; on another stage it "
                    f"would have another value. Let {write.who} return it and pass it on as an argument, or let both "
                    f"be one module"
                )


def _check_order(log: _AccessLog, recording: ForwardRecording, key: StateKey) -> None:
    """Refuse to read what every stage keeps before it is written: from there on it is right everywhere."""
    writers = log.writers(key)
    last = max(number for number, call in enumerate(recording.calls) if call.unit in writers)
    if any(read.position <= last for read in log.outside(key)):
        raise ModelError(
            f"{', '.join(sorted(writers))} keeps {log.name(key)} from one call of the model to the next; stages end at "
            f"their last unit and would not all see what it was set to. Read it after the last call of "
            f"{', '.join(sorted(writers))} only, or pass it in as an input"
        )


class Guard:
    """What others read of one unit."""

    def __init__(self, name: str, unit: nn.Module, attributes: Sequence[tuple[str, str]]) -> None:
        self._name, self._attributes = name, list(attributes)
        inner = dict(unit.named_modules())
        self._holders = [(inner[holder], attribute) for holder, attribute in attributes]

    def values(self) -> list[Any]:
        return [_snapshot(holder, attribute) for holder, attribute in self._holders]

    def check(self, before: list[Any]) -> None:
        now = self.values()
        if now == before:
            return
        changed = self._attributes[next(number for number, each in enumerate(now) if each != before[number])]
        raise ModelError(
            f"{self._name} has changed its {'.'.join(filter(None, changed))} in its forward, which it left alone with "
            f"the example; code outside of {self._name} reads it, on stages that do not see the change. Let "
            f"{self._name} return it, or build the pipeline with the model in the mode, and with an example, in which "
            f"it changes"
        )


def _snapshot(holder: nn.Module, attribute: str) -> Any:
    value = vars(holder).get(attribute, holder._buffers.get(attribute))
    if isinstance(holder, _BatchNorm) and holder.num_batches_tracked is not None:
        return frozen(value), holder.num_batches_tracked._version  # Statistics are written past their versions.
    return frozen(value, 1) if isinstance(value, (*CONTAINERS, *PLAIN)) else frozen(value, 0)
