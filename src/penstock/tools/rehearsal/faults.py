"""Faults by plan: what goes wrong in a rehearsal, on which rank or message, and when.

Each has a text form, the same in Python and on the command line:

    die 3 at 12.5               the process of rank 3 ends; its connections close
    stop 3 at 12.5 for 40       the process stands still, with all its threads; without `for`, for ever
    stall 3 at 3B2 for 40       its computation stands still, and the rest of the process lives
    slow 3 at 10 by 2.5 for 5   its computations take that many times as long
    fail 3 at 3F7               its computation raises an error
    interrupt 3 at 12 after 40  Ctrl-C, so many lines of the library's code after that time (in training)
    lose 2SEND_F4               the message never comes
    duplicate 2SEND_F4          it comes twice
    reorder 2SEND_F4            the next message of its channel overtakes it

A time counts from the start of training, in the unit of the costs. An action is one of the rank's computations, as it
begins; `in step 2` after it says in which step (by default the first, 0).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import NotationError, UsageError
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.action import parse

PROCESS = ("die", "stop", "stall", "slow", "fail", "interrupt")  # what happens to a rank
MESSAGE = ("lose", "duplicate", "reorder")  # what happens to a message
LASTING = ("stop", "stall", "slow")

_NUMBER = r"[0-9.]+(?:[eE][-+]?[0-9]+)?"
_RANK = re.compile(
    rf"(?P<kind>{'|'.join(PROCESS)}) +(?P<rank>[0-9]+) +at +(?P<at>\S+)"
    rf"(?: +in +step +(?P<step>[0-9]+))?(?: +by +(?P<by>{_NUMBER}))?(?: +after +(?P<after>[0-9]+))?"
    rf"(?: +for +(?P<seconds>{_NUMBER}))?"
)
_SENT = re.compile(rf"(?P<kind>{'|'.join(MESSAGE)}) +(?P<at>\S+)(?: +in +step +(?P<step>[0-9]+))?")
_FORMS = "'die 3 at 12.5', 'stop 3 at 12.5 for 40', 'slow 3 at 10 by 2.5', 'fail 3 at 3F7 in step 1' or 'lose 2SEND_F4'"


@dataclass(frozen=True)
class PlannedFault:
    """One thing that goes wrong.

    Args:
        kind: `"die"`, `"stop"`, `"stall"`, `"slow"`, `"fail"` or `"interrupt"` for a rank; `"lose"`,
            `"duplicate"` or `"reorder"` for a message.
        at: A time from the start of training, or an action: a computation of the rank, or the message's send.
        rank: The rank. A message needs none.
        step: In which step, where `at` is an action.
        seconds: How long the rank stops, stalls or is slow. By default, for ever.
        factor: How many times as long the computations of a slow rank take.
        lines: How many lines of the library's code a rank runs before Ctrl-C comes.
    """

    kind: str
    at: float | Action
    rank: int | None = None
    step: int = 0
    seconds: float = math.inf
    factor: float = 1.0
    lines: int = 0

    def __str__(self) -> str:
        words = [self.kind] if self.rank is None else [self.kind, str(self.rank), "at"]
        words.append(str(self.at) if isinstance(self.at, Action) else f"{self.at:g}")
        if self.step:
            words.append(f"in step {self.step}")
        if self.kind == "slow":
            words.append(f"by {self.factor:g}")
        if self.lines:
            words.append(f"after {self.lines}")
        if self.seconds < math.inf:
            words.append(f"for {self.seconds:g}")
        return " ".join(words)

    @property
    def is_fatal(self) -> bool:
        """Whether the rank never comes back from it."""
        return self.kind == "die" or (self.kind in ("stop", "stall") and self.seconds == math.inf)


def parse_fault(text: str) -> PlannedFault:
    """Parse a planned fault from its text.

    Args:
        text: Such as `"die 3 at 12.5"`.
    """
    found = _RANK.fullmatch(text.strip()) or _SENT.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no fault; write it as {_FORMS}")
    given = found.groupdict()
    kind, step = given["kind"], int(given["step"] or 0)
    if kind in MESSAGE:
        return PlannedFault(kind, _when(text, given["at"]), None, step)
    seconds = math.inf if given["seconds"] is None else _number(text, given["seconds"])
    factor = 1.0 if given["by"] is None else _number(text, given["by"])
    if (given["by"] is None) != (kind != "slow"):
        raise UsageError(f"{text!r}: 'by' says how slow a rank is, such as 'slow 3 at 10 by 2.5'")
    if given["seconds"] is not None and kind not in LASTING:
        raise UsageError(f"{text!r}: 'for' is for what ends again: {', '.join(LASTING)}")
    if given["after"] is not None and kind != "interrupt":
        raise UsageError(
            f"{text!r}: 'after' counts lines of code before an interrupt, as in 'interrupt 3 at 12 after 40'"
        )
    lines = int(given["after"] or 0)
    return PlannedFault(kind, _when(text, given["at"]), int(given["rank"]), step, seconds, factor, lines)


def check_plan(faults: Iterable[PlannedFault | str], program: Schedule, steps: int) -> list[PlannedFault]:
    """Return the faults of a rehearsal; raise if the program lacks what they are about or a message has two fates."""
    planned = [check_planned(fault, program, steps) for fault in faults]
    fates: dict[tuple[float | Action, int], PlannedFault] = {}
    for fault in planned:
        if fault.kind in MESSAGE and (other := fates.setdefault((fault.at, fault.step), fault)) is not fault:
            raise UsageError(f"'{other}' and '{fault}' are about the same message; plan one of them")
    return planned


def check_planned(fault: PlannedFault | str, program: Schedule, steps: int) -> PlannedFault:
    """Return the fault; raise if this program lacks what it is about."""
    if isinstance(fault, str):
        fault = parse_fault(fault)
    if not isinstance(fault, PlannedFault):
        raise UsageError(f"faults are texts, such as {_FORMS}, or Faults; got {fault!r}")
    if fault.kind not in PROCESS + MESSAGE:
        raise UsageError(f"{fault.kind!r} is no kind of fault; there are {', '.join(PROCESS + MESSAGE)}")
    if not 0 <= fault.step < steps:
        raise UsageError(f"'{fault}': there is no step {fault.step}; the rehearsal has steps 0 to {steps - 1}")
    if not (fault.seconds > 0 and 0 < fault.factor < math.inf):
        raise UsageError(f"'{fault}': seconds and factor must be above 0")
    if fault.kind in MESSAGE:
        return _check_message(fault, program)
    if not isinstance(fault.rank, int) or not 0 <= fault.rank < program.ranks:
        raise UsageError(f"'{fault}': there is no rank {fault.rank}; the program has ranks 0 to {program.ranks - 1}")
    if isinstance(fault.at, Action):
        own = program.placement.rank_of(fault.at.stage) if fault.at.stage < program.stages else None
        if own != fault.rank or not fault.at.op.is_compute or not _has(program, fault.at):
            raise UsageError(f"'{fault}': {fault.at} is no computation of rank {fault.rank}; see the program (show)")
    elif not 0 <= fault.at < math.inf:
        raise UsageError(f"'{fault}': a time is 0 or more and finite")
    elif fault.step:
        raise UsageError(f"'{fault}': a time counts from the start of training; 'in step' goes with an action")
    return fault


def _check_message(fault: PlannedFault, program: Schedule) -> PlannedFault:
    if not isinstance(fault.at, Action) or fault.at.op not in (Op.SEND_F, Op.SEND_B) or not _has(program, fault.at):
        raise UsageError(f"'{fault}': the program sends no such message; name its send, such as 0SEND_F1")
    return fault


def _has(program: Schedule, action: Action) -> bool:
    if action.stage >= program.stages:
        return False
    columns, rank = program.columns, program.placement.rank_of(action.stage)
    own = slice(*columns.starts[rank : rank + 2].tolist())
    peer = -1 if action.peer is None else action.peer
    wanted = (columns.stage[own] == action.stage) & (columns.op[own] == action.op)
    return bool((wanted & (columns.microbatch[own] == action.microbatch) & (columns.peer[own] == peer)).any())


def _when(text: str, at: str) -> float | Action:
    try:
        return float(at)
    except ValueError:
        pass
    try:
        return parse(at)
    except NotationError as error:
        raise UsageError(f"{text!r}: {at!r} is neither a time nor an action ({error})") from None


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise UsageError(f"{text!r}: {number!r} is not a number") from None
