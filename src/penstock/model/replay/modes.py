"""What a model does in training mode, where it was in eval mode when it was cut.

Models come from `from_pretrained` in eval mode and are trained later, and a frozen batch norm may be thawed. In
training mode the code between units may draw, keep or change what it leaves alone in eval mode, and need other values;
a plan that does not know of that would train wrongly without an error. So such a model is recorded in training mode as
well, and the plan holds for both: a value that is needed in either is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.names import dotted_name
from penstock.model.replay.recording.unit_calls import STATE, ForwardRecording, Mark, Untried


def also_in_training(
    modules: Sequence[nn.Module], recording: ForwardRecording, record: Callable[[], ForwardRecording]
) -> None:
    """Let a recording hold for training mode too; where that cannot be, it says for which modules not, and why."""
    still = [module for module in modules if not module.training]
    if not still:
        return
    try:
        with in_modes(still, [True] * len(still)):
            reason = _join(recording, record())
    except (ModelError, UsageError) as error:
        reason = str(error)
    if reason:
        recording.untried = Untried(still, reason)


@contextmanager
def in_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> Iterator[None]:
    """A context in which each module is in training mode or not, as `modes` says."""
    before = [module.training for module in modules]
    try:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _join(recording: ForwardRecording, other: ForwardRecording) -> str:
    """Put what is needed or changed in the other recording into the first; else why that cannot be."""
    pairs = list(zip(recording.calls, other.calls, strict=False))
    for one, two in pairs:
        if one.unit != two.unit or one.glue != two.glue:
            return f"it calls {two.unit} where {one.unit} is called in eval mode"
        if one.spec != two.spec or one.adds != two.adds:
            return f"{one.unit} returns values in another structure than in eval mode"
    if len(recording.calls) != len(other.calls):
        return f"it makes {len(other.calls)} unit calls, and {len(recording.calls)} in eval mode"
    first = len(recording.states)
    recording.states += other.states
    for unit, places in other.guarded.items():
        recording.guarded[unit] = list(dict.fromkeys([*recording.guarded.get(unit, ()), *places]))
    moving = {state.name for state in recording.states}
    for unit, places in recording.guarded.items():  # what changes in training mode need not stay as it is
        places[:] = [place for place in places if dotted_name(unit, *place) not in moving]
    for one, two in pairs:
        one.needs |= _renumbered(two.needs, first)
        one.keeps = one.keeps or two.keeps
        one.changed_in_place |= two.changed_in_place
    recording.output |= _renumbered(other.output, first)
    recording.writes_inputs |= other.writes_inputs
    return ""


def _renumbered(marks: frozenset[Mark], first: int) -> frozenset[Mark]:
    """States count from the end of those that the other recording has."""
    return frozenset((kind, number + first) if kind == STATE else (kind, number) for kind, number in marks)
