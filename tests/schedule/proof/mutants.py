"""Small changes to a schedule: one action lost, doubled, swapped, or sent elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import NotationError
from penstock.schedule import Action, Op, Schedule

KINDS = ("delete", "duplicate", "swap", "stage", "microbatch", "rank", "peer")

Rows = list[list[Action | None]]


class Mutant(NamedTuple):
    """A changed schedule, and what was changed where."""

    kind: str
    rank: int
    action: Action
    schedule: Schedule

    def __str__(self) -> str:
        return f"{self.kind} {self.action} of rank {self.rank} in {self.schedule!r}"


def mutants(schedule: Schedule, dice: random.Random, per_kind: int | None = None) -> Iterator[Mutant]:
    """Mutants of `per_kind` actions for each kind of change; None: of every action."""
    places = [(rank, at) for rank, row in enumerate(schedule.rows) for at, action in enumerate(row) if action]
    for kind in KINDS:
        chosen = places if per_kind is None else dice.sample(places, min(per_kind, len(places)))
        for rank, at in chosen:
            action = schedule.rows[rank][at]
            assert action is not None
            rows = changed([list(row) for row in schedule.rows], kind, rank, at, schedule, dice)
            if rows is not None:
                mutant = schedule.replace(rows)
                if mutant.rows != schedule.rows:
                    yield Mutant(kind, rank, action, mutant)


def changed(rows: Rows, kind: str, rank: int, at: int, schedule: Schedule, dice: random.Random) -> Rows | None:
    """The rows after one change; None where the action has nothing of that kind to change."""
    row = rows[rank]
    action = row[at]
    assert action is not None
    if kind == "delete":
        del row[at]
    elif kind == "duplicate":
        row.insert(dice.randint(0, len(row)), action)
    elif kind == "swap":
        if at + 1 == len(row):
            return None
        row[at], row[at + 1] = row[at + 1], row[at]
    elif kind == "rank":
        del row[at]
        there = dice.randrange(schedule.ranks + 1)
        if there == rank or there == schedule.ranks:
            return None
        rows[there].insert(dice.randint(0, len(rows[there])), action)
    else:
        other = retargeted(action, kind, schedule, dice)
        if other is None:
            return None
        row[at] = other
    return rows


def retargeted(action: Action, what: str, schedule: Schedule, dice: random.Random) -> Action | None:
    """The same op on another stage, microbatch or peer; of a pair, one part of it."""
    if action.pair is not None:
        first, second = action.pair
        if dice.random() < 0.5:
            other = retargeted(first, what, schedule, dice)
            return other and Action.overlap(other, second)
        other = retargeted(second, what, schedule, dice)
        return other and Action.overlap(first, other)
    stage, op, microbatch, peer, _ = action
    if what == "stage":
        stage = dice.randrange(schedule.stages + 1)
    elif what == "microbatch":
        if microbatch is None:
            return None
        microbatch = dice.randrange(schedule.microbatches + 1)
    else:
        if not op.is_transfer:
            return None
        peer = dice.randrange(schedule.stages + 1)
    try:
        return Action(stage, Op(op), microbatch, peer)
    except NotationError:  # such as a transfer to the stage itself: cannot even be written
        return None
