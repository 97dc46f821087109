"""From a recording to stages: which stage makes which call, what crosses to whom, and errors for a model that departs.

Calls are assigned in call order, contiguously. A stage replays the whole glue, so what it needs from elsewhere are the
marks at the arguments of its own calls (and, for the last one, at the final output) that belong to calls of other
stages; each travels straight from the stage that made it. A call of parameters that an earlier stage owns is made where
it stands, on a copy of those parameters.

In the backward a checkpoint calls its function once more. Where that calls a unit of this stage, the unit runs as it
did before. Other stages' units cannot run again, nor can a checkpoint's own forward be without gradients while the
stage's is to have them: what it emits from inside would be cut off from the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError, PathError
from penstock.model.names import dotted_name
from penstock.model.replay.recording.unit_calls import (
    PARAMETER,
    STATE,
    ForwardRecording,
    KeptState,
    Leaf,
    Mark,
    UnitCall,
    differ,
)
from penstock.schedule.topology import Topology

GLUE = -1  # Stands for a stage where every stage makes the call.


@dataclass(frozen=True)
class StagePlan:
    """Which stage makes which call, and which values cross from stage to stage."""

    recording: ForwardRecording
    stage_of: tuple[int, ...]  # Indexed by call.
    stages: int
    crossing: dict[tuple[int, int], tuple[Mark, ...]]  # (from stage, to stage) -> what crosses
    topology: Topology
    glue_parameters: tuple[tuple[str, ...], ...]  # Indexed by stage: parameters and buffers that its glue reads.

    def units_of(self, stage: int) -> list[str]:
        calls = self.recording.calls
        return list(dict.fromkeys(calls[number].unit for number, owner in enumerate(self.stage_of) if owner == stage))


def plan_stages(recording: ForwardRecording, cuts: Sequence[int]) -> StagePlan:
    """Plan the stages; `cuts` are the numbers of the first calls of stages 1, 2, ..."""
    stages = len(cuts) + 1
    stage_of, stage = [], 0
    for number in range(len(recording.calls)):
        while stage < len(cuts) and number >= cuts[stage]:
            stage += 1
        stage_of.append(GLUE if recording.calls[number].glue else stage)
    crossing: dict[tuple[int, int], set[Mark]] = {}
    read: list[dict[str, None]] = [{} for _ in range(stages)]
    needs = [(stage_of[number], mark) for number, call in enumerate(recording.calls) for mark in call.needs]
    needs += [(stages - 1, mark) for mark in sorted(recording.output)]
    for stage, mark in needs:
        if mark[0] == PARAMETER:
            read[stage][recording.parameters[mark[1]]] = None
        elif mark[0] == STATE:
            _check_state(recording, stage_of, stage, recording.states[mark[1]])
        elif stage_of[mark[0]] != stage:
            crossing.setdefault((stage_of[mark[0]], stage), set()).add(mark)
    _check_kept(recording, stage_of)
    if not recording.output:
        raise ModelError("the model's output does not depend on any of its units; there is nothing to train")
    topology = Topology(stages, crossing)
    ordered = {edge: tuple(sorted(marks)) for edge, marks in crossing.items()}
    return StagePlan(recording, tuple(stage_of), stages, ordered, topology, tuple(map(tuple, read)))


def state_across(recording: ForwardRecording, cut: int) -> str:
    """Name what units keep from call to call and is needed on both sides of a cut; empty: there is nothing."""
    before = {call.unit: call.keeps for call in recording.calls[:cut] if call.keeps}
    unit = next((call.unit for call in recording.calls[cut:] if call.unit in before), None)
    if unit is not None:
        return dotted_name(unit, before[unit])
    for number, state in enumerate(recording.states):
        readers = [place for place, call in enumerate(recording.calls) if (STATE, number) in call.needs]
        readers += [len(recording.calls)] if (STATE, number) in recording.output else []
        writers = [place for place, call in enumerate(recording.calls) if call.unit in state.writers]
        if readers and min(readers + writers) < cut <= max(readers + writers):
            return state.name
    return ""


def _check_state(recording: ForwardRecording, stage_of: Sequence[int], stage: int, state: KeptState) -> None:
    for number, call in enumerate(recording.calls):
        if call.unit in state.writers and stage_of[number] not in (GLUE, stage):
            raise ModelError(
                f"{call.unit}, on stage {stage_of[number]}, changes {state.name} in its forward, and stage {stage} "
                f"reads it, where it would have another value. Let {call.unit} return it and pass it on as an "
                f"argument, let both be one module, or cut so that they are on one stage"
            )


def _check_kept(recording: ForwardRecording, stage_of: Sequence[int]) -> None:
    """Refuse running statistics and counters on two stages, which would not keep their one order of updates."""
    where: dict[str, int] = {}
    for number, call in enumerate(recording.calls):
        if call.keeps and where.setdefault(call.unit, stage_of[number]) != stage_of[number]:
            raise ModelError(
                f"{call.unit} is called on stages {where[call.unit]} and {stage_of[number]} and updates {call.keeps} "
                f"at each call; on two stages the order of updates would differ. Cut before its first or after its "
                f"last call, use a copy for each place, or put it in eval mode"
            )


def stale(what: str) -> PathError:
    return PathError(
        f"the model took another path than with the example: {what}. Its data flow depends on values, random "
        f"numbers, sizes, on which inputs are given, or on the mode; pass an example= that takes this path, make "
        f"the part that decides one unit, or pass a list of stage modules"
    )


def diverged(calls: Sequence[UnitCall], what: str, number: int) -> PathError:
    due = f"{calls[number].unit} was due" if number < len(calls) else "no further call was due"
    return PathError(
        f"the model took another path than with the example: as call {number}, {what}, where {due}. Its control "
        f"flow depends on the data, on sizes or on the mode; make the part that decides one unit, or pass a list of "
        f"stage modules"
    )


def check_returned(
    calls: Sequence[UnitCall], number: int, leaves: list[Any], spec: Any, known: list[Any], expected: Any
) -> None:
    """Refuse a call that did not return what stages after this one go by."""
    unit = calls[number].unit
    if spec != expected:
        raise diverged(calls, f"{unit} returned values in another structure", number)
    for place, (leaf, other) in enumerate(zip(leaves, known, strict=True)):
        if isinstance(leaf, Tensor) != isinstance(other, Leaf):
            raise diverged(calls, f"{unit} returned {_named(leaf)} as value {place}", number)
        if isinstance(leaf, Tensor) and tuple(leaf.shape) != other.shape:
            raise diverged(calls, f"{unit} returned a tensor of shape {tuple(leaf.shape)}", number)
        if not isinstance(leaf, Tensor) and differ(leaf, other):
            what = f"{unit} returned {_named(leaf)} instead of {_named(other)} as value {place}"
            raise diverged(calls, f"{what}, which is no tensor and so not sent", number)


def _named(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float, str)) or value is None else f"a {type(value).__name__}"


_APPLY: Any = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def cannot_repeat(name: str) -> ModelError:
    return ModelError(
        f"the model's code checkpoints the call of {name}, and so code of other stages with it; let the unit "
        f"checkpoint itself, in its own forward, or leave that to Pipeline(recompute='always')"
    )


def check_reentrant(name: str, with_gradients: bool) -> None:
    """Refuse a call of a unit inside of a function that runs without gradients and puts them in later."""
    if not with_gradients or torch.is_grad_enabled():
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            raise ModelError(
                f"the model's code calls {name} inside of a torch.autograd.Function (a checkpoint with "
                f"use_reentrant=True, a reversible network), which hides the gradients of what this stage sends on; "
                f"pass use_reentrant=False, or let that function and what it calls be one module"
            )
        frame = frame.f_back
