"""Certificates: what was proved, of which program, by which rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import NotationError, ScheduleError
from penstock.schedule import Certificate, Schedule, build, lower, verify
from penstock.schedule.proof import certificate as module

PROGRAM = lower(build("zb-v", 3, 4))


def test_a_proof_says_what_it_proved() -> None:
    order, program, sharded = (
        verify(schedule).proved
        for schedule in (build("zb-v", 3, 4), PROGRAM, lower(build("zb-v", 3, 4), reduce=True, window=1))
    )
    assert "the order of all ranks together ends" in order
    assert "the program ends with nothing buffered" in program
    assert "the program ends with nothing buffered" not in order
    assert set(sharded) - set(program) == {"a stage is whole when it computes, and its gradients are reduced once"}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_equal_programs_have_equal_certificates_and_others_have_others(name: str) -> None:
    program = lower(build(name, 3, 4, skips=[(0, 2)]))
    certificate = verify(program)
    again = Schedule(program.rows, placement=program.placement, topology=program.topology, microbatches=4)
    assert verify(again) == certificate
    others = [
        program.replace(recompute=[1]),
        program.replace([[*row, None] for row in program.rows]),
        program.replace(microbatches=5),
        program.replace([row[:-1] for row in program.rows]),
        lower(build(name, 3, 4)),
    ]
    for other in others:
        with pytest.raises(ScheduleError, match="changed after the proof"):
            certificate.check(other)


def test_a_certificate_goes_with_the_file_and_is_checked_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    program = lower(build("zb-v", 3, 4))
    program.save(path)
    assert Schedule.load(path).certificate is None  # nobody has proved it
    certificate = verify(program)
    program.save(path)
    assert Schedule.load(path).certificate == certificate == program.certificate
    assert program.replace(recompute=[0]).certificate is None


def changed(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_file_that_was_changed_after_its_proof_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    program = lower(build("1f1b", 2, 3))
    verify(program)
    program.save(path)
    rows = json.loads(path.read_text())["rows"]
    rows[0][:2] = rows[0][1::-1]
    changed(path, rows=rows)
    with pytest.raises(ScheduleError, match="changed after the proof"):
        Schedule.load(path)
    assert Schedule.load(path, check=False).certificate is None
    changed(path, certificate={"digest": 5})
    with pytest.raises(NotationError, match="not complete"):
        Schedule.load(path)


def test_a_certificate_by_other_rules_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program.json"
    certificate = verify(PROGRAM)
    PROGRAM.save(path)
    written = json.loads(path.read_text())["certificate"]
    changed(path, certificate=written | {"rules": module.RULES + 1})
    assert Schedule.load(path).certificate is None
    older = replace(certificate, rules=module.RULES - 1)
    with pytest.raises(ScheduleError, match="verify it again"):
        older.check(PROGRAM)
    assert isinstance(older, Certificate)
