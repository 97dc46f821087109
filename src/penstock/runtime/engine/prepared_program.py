"""What can be worked out about a program before its first step on a rank, and two fields that the executor fills."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.transport.channel import Incoming
from penstock.schedule import Action, Op, Schedule

Entry = tuple[Callable[[Any, Any], Any], Any, Any]  # an action, ready to run: a function and its two arguments


@dataclass
class PreparedProgram:
    """One rank's part of a program."""

    program: Schedule
    actions: list[Action]
    split_backward: frozenset[tuple[int, int]]  # (stage, microbatch) whose backward comes as I and W
    for_handlers: list[Action]  # computes that users' handlers have to run
    done: str  # where a rank is that has run all of it, in words
    entries: list[Entry] = field(default_factory=list)  # of the actions, once the program's channels are open
    receives: Sequence[tuple[Incoming, int]] = ()  # The ends that receive, and how many times in a step.


def prepare(program: Schedule, rank: int, handlers: Collection[Op]) -> PreparedProgram:
    """Prepare a program for one rank; `handlers` are the ops for which users have handlers of their own."""
    actions = _with_open_pairs([action for action in program.rows[rank] if action is not None], handlers)
    parts = [(part, action.op in handlers or part.op in handlers) for action in actions for part in action.parts()]
    return PreparedProgram(
        program,
        actions,
        split_backward=frozenset((part.stage, part.microbatch) for part, _ in parts if part.op is Op.I),
        for_handlers=[part for part, is_handled in parts if is_handled and part.op.is_compute],
        done=f"done with all {len(actions)} actions, last {actions[-1] if actions else 'nothing'}",
    )


def _with_open_pairs(actions: list[Action], handlers: Collection[Op]) -> list[Action]:
    """Open pairs that no handler overlaps: one half, what it made is sent, the other half.

    The send may go before the other half where it stands next in the program: no other rank can tell whether that
    half is done by then.
    """
    opened: list[Action] = []
    rest = deque(actions)
    while rest:
        action = rest.popleft()
        if not action.op.is_pair or action.op in handlers:
            opened.append(action)
            continue
        first, second = action.parts()
        opened.append(first)
        while rest and _sends(rest[0], first):
            opened.append(rest.popleft())
        opened.append(second)
    return opened


def _sends(action: Action, made_by: Action) -> bool:
    """Whether an action sends what a computation has made."""
    sent = Op.SEND_F if made_by.op is Op.F else Op.SEND_B
    return action.op is sent and (action.stage, action.microbatch) == (made_by.stage, made_by.microbatch)
