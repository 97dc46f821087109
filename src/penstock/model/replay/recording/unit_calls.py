"""What is known of a model's run on its example: unit calls, what each needed, what it returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from penstock.model.replay.recording.nested_values import flatten, tensors_in

Mark = tuple[int, int]  # (call, leaf of its output); or (PARAMETER, number), (STATE, number) for what the glue reads
PARAMETER, STATE = -1, -2


@dataclass(frozen=True)
class Leaf:
    """One tensor of a unit call's output, as far as a stand-in needs to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class KeptState:
    """An attribute that units change in their calls and others read."""

    name: str
    writers: frozenset[str]


@dataclass
class UnitCall:
    """One call of a unit: which, what it needed, what it returned."""

    unit: str
    needs: frozenset[Mark]
    leaves: list[Any]  # Leaf for tensors, the value itself for the rest
    spec: Any
    given: Any = None  # what decided the shapes: those of its arguments, plain values, the mode
    glue: bool = False  # a parameter-free module that no unit's value reaches: every stage runs it
    changed_in_place: bool = False  # the glue writes into what it returned
    adds: bool = False  # Adds to lists or dicts; (what it returns, what it adds) are its leaves.
    keeps: str = ""  # what it changes on itself at every call, such as running statistics


def _kind(leaf: Any) -> type:
    return torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf)  # one that a collective fills is one, too


def shapes_of(value: Any, mode: Any = True) -> tuple[Any, ...]:
    """Return what decides the shapes of a call's results: those of its arguments, plain values, where they stand, the
    mode.
    """
    leaves, structure = flatten(value)
    plain = tuple(leaf if leaf is None or isinstance(leaf, (int, float, str)) else _kind(leaf) for leaf in leaves)
    tensors = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))
    return (tensors, plain, structure, mode)


@dataclass(frozen=True)
class Untried:
    """Modules that were in eval mode in every run that was recorded, and why there was none with them in training."""

    modules: list[nn.Module]
    reason: str


@dataclass
class ForwardRecording:
    """All unit calls in order, and what the final output needs."""

    calls: list[UnitCall] = field(default_factory=list)
    output: frozenset[Mark] = frozenset()
    parameters: list[str] = field(default_factory=list)  # Also buffers: what (PARAMETER, number) stands for.
    states: list[KeptState] = field(default_factory=list)  # What (STATE, number) stands for.
    # By unit, what others read of it and must not change: (module inside of the unit, attribute).
    guarded: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    draws_in_glue: bool = False
    reads_values: bool = False  # the glue turned a tensor into a Python value
    writes_inputs: bool = False  # the glue changes the model's inputs in place
    # Checksums of what each unit call was given and returned; at the end, of the output.
    values: list[tuple[str, int, int]] = field(default_factory=list)
    untried: Untried | None = None  # None: the recording holds for training mode as well
