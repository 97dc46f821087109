"""Errors carry what they say as attributes, survive a pickle, and are caught as what a user would expect."""

from __future__ import annotations

import errno
import pickle
from typing import Any

import pytest

from penstock.errors import (
    SHOWN_FAULTS,
    CheckpointError,
    CycleMember,
    Fault,
    FileError,
    ModelError,
    NotationError,
    ParityError,
    PeerFailure,
    PenstockError,
    ScheduleError,
    UsageError,
)
from penstock.schedule import parse

PEER = PeerFailure(
    2, "ValueError: no", stage=5, action="5F1", microbatch=1, original_traceback="Traceback\n", report="a table\n",
    replica=1, shard=3,
)  # fmt: skip
ALL = [
    PEER,
    FileError("run.json", "it is not JSON"),
    CheckpointError("it is damaged", "/run/step-1"),
    ScheduleError([Fault("no receive", 1, 2, parse("0F0")), Fault("twice")]),
    NotationError("0X0 is no action"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    def seen(each: Exception) -> Any:
        return type(each), str(each), {name: value for name, value in vars(each).items() if name != "__notes__"}

    assert seen(pickle.loads(pickle.dumps(error))) == seen(error)


def test_the_failure_of_a_peer_says_who_where_and_why_and_leaves_out_what_is_not_known() -> None:
    assert str(PeerFailure(3, "it died")) == "rank 3 failed: it died"
    assert str(PEER).splitlines() == [
        "rank 2 of replica 1, shard 3, failed (stage 5, action 5F1, microbatch 1): ValueError: no",
        "a table",
        "--- traceback of rank 2 of replica 1, shard 3, ---",
        "Traceback",
    ]


def test_a_fault_says_where_it_is() -> None:
    assert str(Fault("has no receive", 1, 2, parse("0F0"))) == "rank 1, position 2, 0F0: has no receive"
    assert str(Fault("nothing is computed")) == "nothing is computed"
    assert str(Fault("rank alone", 0)) == "rank 0: rank alone"


def test_one_fault_is_its_text_and_many_are_counted() -> None:
    assert str(ScheduleError("it has no rows")) == "it has no rows"
    assert ScheduleError("it has no rows").faults == (Fault("it has no rows"),)
    many = ScheduleError([Fault(str(number)) for number in range(SHOWN_FAULTS + 3)])
    lines = str(many).splitlines()
    assert lines[0] == f"{SHOWN_FAULTS + 3} faults:"
    assert lines[-1].strip() == "... and 3 more (all in .faults)"
    assert len(lines) == SHOWN_FAULTS + 2
    assert len(many.faults) == SHOWN_FAULTS + 3


def test_a_deadlock_keeps_its_members() -> None:
    cycle = (CycleMember(0, 1, parse("0B0")), CycleMember(1, 0, parse("1F0")))
    (fault,) = ScheduleError([Fault("a deadlock", cycle=cycle)]).faults
    assert [(each.rank, each.position, str(each.action)) for each in fault.cycle] == [(0, 1, "0B0"), (1, 0, "1F0")]


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (UsageError, ValueError),
        (FileError, OSError),
        (FileError, UsageError),
        (ScheduleError, ValueError),
        (NotationError, ScheduleError),
        (ModelError, ValueError),
        (ParityError, AssertionError),
        (CheckpointError, RuntimeError),
        (PeerFailure, RuntimeError),
    ],
)
def test_errors_are_those_of_python_too(error: type[Exception], caught: type[Exception]) -> None:
    assert issubclass(error, caught)
    assert issubclass(error, PenstockError)


def test_the_error_of_a_file_has_what_an_oserror_has() -> None:
    error = FileError("run.json", "it is not JSON")
    assert (error.errno, error.filename, error.strerror) == (errno.EINVAL, "run.json", "it is not JSON")
    assert str(error) == "run.json: it is not JSON"
