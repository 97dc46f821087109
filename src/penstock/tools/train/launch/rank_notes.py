"""Notes that ranks leave in the folder of a run for the launcher, which sees only exit codes."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, PeerFailure, PenstockError, UsageError
from penstock.reading import check_like, read_json
from penstock.tools.train.run.run_folder import RunFolder, write_json
from penstock.writing import write_whole

# What every note has.
NOTE = {"rank": 0, "culprit": 0, "cause": "", "final": False, "usage": False}


def note_path(folder: RunFolder, attempt: int, rank: int) -> Path:
    """Return the file in which a rank that failed reports why."""
    return folder.logs / f"failed-{attempt}-{rank}.json"


def ready_path(folder: RunFolder, attempt: int, rank: int) -> Path:
    """Return the file that is there while a rank can be asked to stop."""
    return folder.logs / f"ready-{attempt}-{rank}"


def leave_note(path: Path, rank: int, error: BaseException, final: bool) -> None:
    """Note why a rank failed: whose fault it is, the cause, and whether starting again would end in the same way."""
    cause, culprit = f"{type(error).__name__}: {error}", rank
    place: dict[str, Any] = {}
    if isinstance(error, PeerFailure):
        culprit, cause = error.rank, error.cause
        place = {"stage": error.stage, "action": error.action, "microbatch": error.microbatch}
    elif isinstance(error, PenstockError):
        cause = str(error)
        other = re.match(r"process (\d+): ", cause)  # A save has failed on another rank.
        if isinstance(error, CheckpointError) and other:
            culprit, cause = int(other[1]), cause[other.end() :]
    usage = isinstance(error, UsageError)
    note = {"rank": rank, "culprit": culprit, "cause": cause, "final": final, "usage": usage, **place}
    with suppress(OSError):  # Where the disk is full, the exit code must do.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, note)
        write_whole(path.with_suffix(".txt"), "".join(traceback.format_exception(error)))


def read_note(path: Path) -> dict[str, Any] | None:
    """Read a rank's note, if it could leave one."""
    try:
        found: dict[str, Any] = read_json(path)
        check_like(found, NOTE, path)
    except OSError:  # A FileError is one as well.
        return None
    return found if NOTE.keys() <= found.keys() else None
