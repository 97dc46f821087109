"""Further runs on the example, in training mode and once more, so that one recording holds for every run.

Models come from `from_pretrained` in eval mode and are trained later. In training mode the code between units may draw,
keep or change what it leaves alone in eval mode, and need other values; a plan that does not know of that would train
wrongly without an error. So such a model is recorded in training mode as well, and the plan holds for both: a value
that is needed in either is sent.

Every stage runs that code for itself. One that reads a clock, a counter of the process or random numbers that are not
torch's would compute with one value on one stage and with another on the next; what it gives units may not change from
run to run. A unit may do so, because it runs in one place; what comes after one that did says nothing any more.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.model.names import dotted_name
from penstock.model.replay.recording.unit_calls import STATE, ForwardRecording, Mark, Untried, flatten, tensors_in


def also_in_training(
    modules: Sequence[nn.Module], recording: ForwardRecording, record: Callable[[], ForwardRecording]
) -> None:
    """Let a recording hold for training mode too; where that cannot be, note for which modules not, and why."""
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
    """Put each module into training mode or out of it, as `modes` has it, inside."""
    before = [module.training for module in modules]
    try:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _join(recording: ForwardRecording, other: ForwardRecording) -> str:
    """Put what is needed or changed in the other recording into the first; return why that cannot be, if so."""
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
    return frozenset((kind, number + first) if kind == STATE else (kind, number) for kind, number in marks)


PLAIN = (bool, int, float, complex, str, bytes, type(None))


def checksum(value: Any) -> int:
    plain = [leaf for leaf in flatten(value)[0] if isinstance(leaf, PLAIN)]
    found = zlib.crc32(repr(plain).encode())
    for tensor in tensors_in(value):
        found = zlib.crc32(str((tensor.dtype, tuple(tensor.shape))).encode(), found)
        if _has_numbers(tensor):
            dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            size = dense.numel() * dense.element_size()
            found = zlib.crc32((ctypes.c_char * size).from_address(dense.data_ptr()), found) if size else found
    return found


def _has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor's numbers lie in memory: not on the meta device, not inside of a function transform."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def check_repeatable(record: Callable[[], ForwardRecording], first: ForwardRecording | None = None) -> ForwardRecording:
    """Return what `record` gives, or has given `first`, if it gives it once more."""
    first = first or record()
    second = record()
    for one, two in zip_longest(first.values, second.values):
        if one is None or two is None or one[:2] != two[:2]:
            unit = (one or two)[0]
            raise ModelError(
                f"in a second run on the same example, the model's code between its units "
                f"{f'gave {unit} other values' if unit else 'returned other values'}: it reads something that changes "
                f"from call to call, such as a clock, a counter, or random numbers that are not torch's, which every "
                f"stage would read anew; draw with torch (torch.rand), or pass it to the model as an input"
            )
        if one != two:
            break
    return first
