"""From a recording to stages: which stage makes which call, and what crosses to whom.

Calls are assigned in call order, contiguously. A stage replays the whole glue, so what it needs from elsewhere are the
marks at the arguments of its own calls (and, for the last one, at the final output) that belong to calls of other
stages; each travels straight from the stage that made it. A call of parameters that an earlier stage owns is made where
it stands, on a copy of those parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.replay.recording.unit_calls import PARAMETER, STATE, ForwardRecording, KeptState, Mark
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
