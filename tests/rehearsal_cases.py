"""Random rehearsals from seeds: a small schedule, costs, a fault at any point; and what must be true of each outcome.

A seed draws the family, the sizes, the costs, how many steps, who has the store, the jitter, the timeout (which may
well be shorter than a healthy wait) and one fault. What must be true follows from the fault alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.errors import MessageError, PeerFailure
from penstock.schedule import FAMILIES, Action, Costs, Op, Schedule, build, lower, simulate
from penstock.tools.rehearsal.faults import PlannedFault
from penstock.tools.rehearsal.rank import InjectedError
from penstock.tools.rehearsal.rehearse import Rehearsal, rehearse

SENDS = (Op.SEND_F, Op.SEND_B)
KINDS = ("none", "die", "stop", "stall", "slow", "fail", "lose", "duplicate", "reorder")
COSTS = (
    Costs(),
    Costs(forward=0.3, input=0.21, weight=0.17, hop=0.05),
    Costs(forward=0.3, input=0.21, weight=0.17, latency=0.02, bandwidth=10, bytes=1),
    Costs(forward=0.004, input=0.005, weight=0.003, hop=0.001),
)


class Case(NamedTuple):
    """One rehearsal."""

    schedule: Schedule
    costs: Costs
    fault: PlannedFault | None
    options: dict[str, Any]

    def run(self) -> Rehearsal:
        return rehearse(self.schedule, self.costs, faults=[self.fault] if self.fault else [], **self.options)


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    schedule = build(draw.choice(list(FAMILIES)), draw.randint(1, 5), draw.randint(1, 8))
    costs, steps = draw.choice(COSTS), draw.randint(1, 3)
    timeout = draw.choice([2.5, 10.0, 100.0])
    longest = max(map(max, costs.by_op(schedule.stages)))
    options = {
        "seed": seed,
        "steps": steps,
        "timeout": max(timeout, 15 * longest),  # longer than what a slow rank computes at a time
        "jitter": draw.choice([0.0, 0.0, 0.3]),
        "store_host": draw.choice([None, None, 0]),
    }
    return Case(schedule, costs, _draw_fault(draw, schedule, costs, options), options)


def _draw_fault(draw: random.Random, schedule: Schedule, costs: Costs, options: dict[str, Any]) -> PlannedFault | None:
    kind, step, timeout = draw.choice(KINDS), draw.randrange(options["steps"]), options["timeout"]
    program = lower(schedule)
    if kind == "none":
        return None
    if kind in ("lose", "duplicate", "reorder"):
        sends = [each for row in program.rows for each in row if each and each.op in SENDS]
        return PlannedFault(kind, draw.choice(sends), step=step) if sends else None
    rank = draw.randrange(schedule.ranks)
    at: float | Action = draw.uniform(0, options["steps"] * simulate(schedule, costs).makespan)
    if draw.random() < 0.5:
        at = draw.choice([part for part in parts_of(program, rank) if part.op.is_compute])
    seconds = math.inf
    if kind in ("stop", "stall"):
        seconds = draw.choice([math.inf, 0.3 * timeout, 4 * timeout])
    factor = draw.choice([2.0, 5.0]) if kind == "slow" else 1.0
    return PlannedFault(kind, at, rank, step if isinstance(at, Action) else 0, seconds, factor)


def parts_of(program: Schedule, rank: int) -> list[Action]:
    """What a rank does, pairs opened: what the first half made is sent before the second, if that comes next."""
    row = [action for action in program.rows[rank] if action is not None]
    for place in reversed([place for place, action in enumerate(row) if action.op.is_pair]):
        first, second = row[place].parts()
        last = place + 1
        while last < len(row) and row[last].op in SENDS and row[last].stage == first.stage:
            last += 1
        row[place:last] = [first, *row[place + 1 : last], second]
    return row


def _standing(found: Rehearsal) -> set[int | None]:
    return {fault.rank for fault in found.struck if fault.is_fatal}


def faults_of(case: Case, found: Rehearsal) -> list[str]:
    """What is wrong with the outcome, in words."""
    return [*_always(case, found), *(_without_fault if not found.struck else _with_fault)(case, found)]


def _always(case: Case, found: Rehearsal) -> Iterator[str]:
    if found.hung:
        yield f"ranks {found.hung} hang"
    if not found.is_exact:
        yield "losses or gradients are not those of a plain loop"
    for rank in range(case.schedule.ranks):
        expected = parts_of(found.program, rank) * case.options["steps"]
        did = list(found.order[rank])
        if not found.notices:  # a rank that stands still for ever did a part
            expected = expected[: len(did)] if rank in _standing(found) else expected
            if did != expected:
                yield f"rank {rank} did not follow its program"
    for notice in found.notices:
        if not isinstance(notice.error, (PeerFailure, MessageError, InjectedError)):
            yield f"rank {notice.rank} raised {notice.error!r}"


def _without_fault(case: Case, found: Rehearsal) -> Iterator[str]:
    if found.notices or set(found.completed) != {case.options["steps"]}:
        yield f"a healthy run failed: {found.notices[:1]}"


def _with_fault(case: Case, found: Rehearsal) -> Iterator[str]:
    fault, steps = case.fault, case.options["steps"]
    assert fault is not None
    lasts = fault.seconds >= case.options["timeout"]
    right = {fault.rank}
    if fault.kind in ("lose", "duplicate", "reorder"):
        assert isinstance(fault.at, Action)
        right = {case.schedule.placement.rank_of(end) for end in (fault.at.stage, fault.at.other_end)}
    if set(found.named) - right:
        yield f"ranks {found.named} were named, not one of {right}"
    if (fault.kind == "slow" or (fault.kind in ("stop", "stall") and not lasts)) and found.notices:
        yield "a delay that ended in time was called a failure"
    if fault.kind == "fail" and set(found.completed) != {steps - 1}:
        yield f"{found.completed} steps were completed, not all but one"
    if fault.kind == "lose" and not found.notices:
        yield "a lost message was missed by nobody"
    for rank in range(case.schedule.ranks):
        knows = any(each.rank == rank for each in found.notices)
        if not knows and found.completed[rank] < steps and not (fault.is_fatal and rank == fault.rank):
            yield f"rank {rank} neither completed its steps nor heard why"
