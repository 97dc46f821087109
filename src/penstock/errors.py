"""Every exception that Penstock raises on purpose, and its warnings.

::

    PenstockError
    ├── UsageError          a wrong argument: what was given, what would work (ValueError)
    │   └── FileError       a file that is not what it must be: which, and what is wrong with it (OSError)
    ├── ScheduleError       a schedule that is malformed or cannot run; `.faults` lists all of it
    │   └── NotationError   text that is not an action, with row and column (both ValueError)
    ├── ModelError          a model, split or batch that the pipeline cannot take (ValueError)
    │   └── PathError       a batch that takes another path through the model than the example did
    ├── ParityError         a pipelined result differs from the plain one (AssertionError)
    ├── CheckpointError     a checkpoint that is damaged or does not fit, or could not be written (RuntimeError)
    └── RunError            something went wrong while a step ran (RuntimeError)
        ├── MessageError    a message arrived that is not the one that was due
        └── PeerFailure     another rank failed, died or stalled; says which, where and why

    FallbackWarning         a model was cut in another way than the one that comes first (UserWarning)
    CutWarning              stages that are very uneven, empty, or train the same parameters (UserWarning)

One tree of our own, so that `except PenstockError` means "Penstock refused or stopped",
and never hides a defect of the user's model: an error of user code reaches every rank as
`PeerFailure`, and on the rank where it happened that has the error itself as its `__cause__`.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

SHOWN_FAULTS = 40


class PenstockError(Exception):
    """The base of all errors that Penstock raises on purpose: `except PenstockError` hides no defect of your model."""


class FallbackWarning(UserWarning):
    """The preferred way of cutting a model did not apply, and another was used; the message says why."""


class CutWarning(UserWarning):
    """The stages of a model are very uneven, empty, or train the same parameters; the message has names and shares."""


class UsageError(PenstockError, ValueError):
    """An argument that cannot work. The message names it, and one that would."""


class FileError(UsageError, OSError):
    """A file that is not what it must be.

    Args:
        filename: Which file, or where a text is from.
        why: What is wrong with it; this is its `strerror`.
    """

    def __init__(self, filename: object, why: str) -> None:
        super().__init__(str(filename), why)
        self.errno, self.filename, self.strerror = errno.EINVAL, str(filename), why

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.filename, self.strerror)


class CycleMember(NamedTuple):
    """One member of a deadlock: a rank, and the action at which it waits for the next member.

    Attributes:
        rank: The rank.
        position: The position in that rank's row, from 0.
        action: The action at which it waits.
    """

    rank: int
    position: int
    action: Any


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a schedule, and where.

    Attributes:
        message: What is wrong.
        rank: The rank, if it is about one.
        position: The position in that rank's row, from 0.
        action: The action.
        cycle: Of a deadlock, its members: each waits for the next, the last for the first.
    """

    message: str
    rank: int | None = None
    position: int | None = None
    action: Any = None  # an Action; untyped here, because no room comes before errors
    # In a deadlock each member waits for the next, the last for the first.
    cycle: tuple[CycleMember, ...] = ()

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        if self.position is not None:
            where.append(f"position {self.position}")
        if self.action is not None:
            where.append(str(self.action))
        return f"{', '.join(where)}: {self.message}" if where else self.message


class ScheduleError(PenstockError, ValueError):
    """A schedule that must not be run.

    Args:
        faults: Every fault that was found; also the attribute of this name.
    """

    def __init__(self, faults: str | Sequence[Fault]) -> None:
        self.faults: tuple[Fault, ...] = (Fault(faults),) if isinstance(faults, str) else tuple(faults)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.faults) == 1:
            return str(self.faults[0])
        lines = [f"{len(self.faults)} faults:"]
        lines += [f"  {fault}" for fault in self.faults[:SHOWN_FAULTS]]
        if len(self.faults) > SHOWN_FAULTS:
            lines.append(f"  ... and {len(self.faults) - SHOWN_FAULTS} more (all in .faults)")
        return "\n".join(lines)


class NotationError(ScheduleError):
    """Text that is not an action of the notation."""


class ModelError(PenstockError, ValueError):
    """A model, a split of it or a batch that the pipeline cannot take as it is."""


class PathError(ModelError):
    """A batch takes another path through the model than the example with which it was cut."""


class ParityError(PenstockError, AssertionError):
    """The pipelined run and the plain run disagree."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint that is damaged, does not fit, or could not be written.

    Args:
        message: What is wrong.
        path: Where the checkpoint is, or was to be; also the attribute of this name.
    """

    def __init__(self, message: str, path: Any = None) -> None:
        self.path = path
        super().__init__(message)

    def __reduce__(self) -> Any:
        return CheckpointError, (str(self), self.path)


class RunError(PenstockError, RuntimeError):
    """Something went wrong while a step was running."""


class MessageError(RunError):
    """A message arrived that is not the expected one. It is never taken as data."""


# The cause of a loss after which no step can run ends so.
REBUILD = "the group must be rebuilt"


class PeerFailure(RunError):
    """Another rank raised an error, died or stalled.

    ::

        try:
            pipe.step(x, target=y)
        except PeerFailure as failure:
            print(f"rank {failure.rank}, at {failure.action}: {failure.cause}")

    Args:
        rank: The rank that failed.
        cause: What happened, in one line.
        stage: The stage that it was running.
        action: The action that it was running.
        microbatch: The microbatch.
        original_traceback: The failing rank's own traceback, if it could still send it.
        report: A table of what each rank was doing, had finished last and was waiting for.
        replica: The replica of the failing rank, if there are several.
        shard: The shard of the failing rank, if there are several.
    """

    def __init__(
        self,
        rank: int,
        cause: str,
        *,
        stage: int | None = None,
        action: str | None = None,
        microbatch: int | None = None,
        original_traceback: str | None = None,
        report: str | None = None,
        replica: int | None = None,
        shard: int | None = None,
    ) -> None:
        self.rank, self.cause = rank, cause
        self.stage, self.action, self.microbatch = stage, action, microbatch
        self.original_traceback, self.report = original_traceback, report
        self.replica, self.shard = replica, shard
        super().__init__(rank, cause)

    def __str__(self) -> str:
        places = [("stage", self.stage), ("action", self.action), ("microbatch", self.microbatch)]
        where = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        who = f"rank {self.rank}" + ("" if self.replica is None else f" of replica {self.replica}")
        who += "" if self.shard is None else f", shard {self.shard},"
        text = f"{who} failed{f' ({where})' if where else ''}: {self.cause}"
        if self.report:
            text += f"\n{self.report.rstrip()}"
        if self.original_traceback:
            text += f"\n--- traceback of {who} ---\n{self.original_traceback.rstrip()}"
        return text

    def __reduce__(self) -> Any:
        names = ("stage", "action", "microbatch", "original_traceback", "report", "replica", "shard")
        details = {name: getattr(self, name) for name in names}
        return partial(PeerFailure, self.rank, self.cause, **details), ()
