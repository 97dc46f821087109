"""A pass for stages that take their batch in one piece.

Such a stage can run nothing before all of its microbatches have come, and then gives all of its results at once. In a
program that is: every compute of the stage has its place as ever, and what the stage sends leaves after its last one.

    before   0F0 0SEND_F0 0F1 0SEND_F1 ... 0B1 0SEND_B1 0B0 0SEND_B0
    after    0F0 0F1 0SEND_F0 0SEND_F1 ... 0B1 0B0 0SEND_B1 0SEND_B0

Receives are posted before the first forward, those of gradients before the first backward: what a gathering stage sends
comes in one burst, and one message of it that is not awaited yet must not hold up another that is.

Where a rank has several stages, those that follow a gathering one on the same rank wait for its last compute: `in_turn`
puts the computes in that order, before the transfers are added.

That ends only where no backward stands before a forward, on any rank: a rank that wants a gradient before it has sent
all microbatches would wait for ever.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import UsageError
from penstock.schedule.action import Action, Op
from penstock.schedule.lowering.align import align
from penstock.schedule.schedule import Schedule
from penstock.schedule.seen import Row


def gather(program: Schedule, stages: Collection[int]) -> Schedule:
    """Return the lowered program in which these stages take their batch in one piece."""
    if not stages or program.microbatches == 1:
        return program
    for rank, row in enumerate(program.rows):
        late = next((action for action in _late_forwards(row)), None)
        if late is not None:
            name = program.name or "the schedule"
            raise UsageError(
                f"stages {sorted(stages)} take their batch in one piece, but in {name} rank {rank} runs {late} after a "
                f"backward: they would wait for ever; use a schedule that runs all forwards first "
                f"({', '.join(_can_gather())})"
            )
        if any(part.op in (Op.I, Op.W) for action in row if action for part in action.parts()):
            raise UsageError(
                f"stages {sorted(stages)} take their batch in one piece, and their backward cannot be split into I and "
                f"W as {program.name or 'the schedule'} does; use {' or '.join(_can_gather(trains=True))}"
            )
    return program.replace([_posted_early(_gathered(row, stages)) for row in program.rows])


def _can_gather(trains: bool = False) -> list[str]:
    from penstock.schedule.builders import FAMILIES  # That module imports this folder.

    return [name for name, each in FAMILIES.items() if each.runs_forwards_first and (each.trains or not trains)]


def in_turn(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Order the computes so that, on each rank, what needs all of such a stage stands after the last of it.

    gpipe with two stages on a rank goes microbatch by microbatch, 0F0 1F0 0F1 1F1: of a gathering stage 0, nothing is
    there for 1F0 yet. A schedule that `gather` refuses, or that has its transfers, is returned as it is.
    """
    if not stages or schedule.microbatches == 1 or schedule.passes:
        return schedule
    rows = [[action for action in row if action is not None] for row in schedule.rows]
    if any(_late_forwards(row) or any(action.op not in (Op.F, Op.B) for action in row) for row in map(tuple, rows)):
        return schedule
    turned = [_row_in_turn(row, stages) for row in rows]
    return schedule if turned == rows else align(schedule.replace(turned))


def _row_in_turn(row: list[Action], stages: Collection[int]) -> list[Action]:
    here = {action.stage for action in row} & set(stages)

    def turn(action: Action) -> tuple[bool, int]:
        """Return how many of the gathering stages here it comes after, among forwards and among backwards."""
        if action.op is Op.F:
            return False, sum(stage < action.stage for stage in here)
        return True, sum(stage > action.stage for stage in here)

    return sorted(row, key=turn)


def _late_forwards(row: Row) -> list[Action]:
    parts = [part for action in row if action is not None for part in action.parts()]
    first = next((position for position, part in enumerate(parts) if part.op.is_backward), len(parts))
    return [part for part in parts[first:] if part.op is Op.F]


def _gathered(row: Row, stages: Collection[int]) -> list[Action | None]:
    left = {(stage, op): sum(_is(action, stage, op) for action in row) for stage in stages for op in (Op.F, Op.B)}
    computes = {Op.SEND_F: Op.F, Op.SEND_B: Op.B}
    held: dict[tuple[int, Op], list[Action]] = {key: [] for key in left}
    found: list[Action | None] = []
    for action in row:
        if action is None or action.stage not in stages:
            found.append(action)
            continue
        key = (action.stage, computes.get(action.op, action.op))
        if action.op in computes and left[key]:
            held[key].append(action)
            continue
        found.append(action)
        if action.op in (Op.F, Op.B):
            left[key] -= 1
            if not left[key]:
                found += held.pop(key)
    return found


def _posted_early(row: list[Action | None]) -> list[Action | None]:
    """Post receives early: nothing waits for one but what comes from the other half of the step."""
    forward = [action for action in row if action is not None and action.op is Op.RECV_F]
    backward = [action for action in row if action is not None and action.op is Op.RECV_B]
    rest = [action for action in row if action is None or action.op not in (Op.RECV_F, Op.RECV_B)]
    first = next((place for place, action in enumerate(rest) if action is not None and action.op is Op.B), len(rest))
    return [*forward, *rest[:first], *backward, *rest[first:]]


def _is(action: Action | None, stage: int, op: Op) -> bool:
    return action is not None and action.op is op and action.stage == stage
