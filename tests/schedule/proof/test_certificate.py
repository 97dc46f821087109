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
ENDS = "the program ends with nothing buffered and one stream for each direction between two ranks"
PROVED = [*module.COMPUTES, *module.PROGRAM, ENDS]


def test_a_proof_says_what_it_proved() -> None:
    order, program, sharded = (
        verify(schedule).proved
        for schedule in (build("zb-v", 3, 4), PROGRAM, lower(build("zb-v", 3, 4), reduce=True, window=1))
    )
    assert "the order of all ranks together ends" in order
    assert ENDS in program
    assert ENDS not in order
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


@pytest.mark.parametrize(
    "lie",
    [
        {"digest": 5},
        {"digest": None},
        {"digest": "0" * 32},
        {"proved": "all of it"},
        {"proved": [[[]]]},
        {"proved": []},
        {"proved": [*PROVED, "it is fast"]},
        {"proved": PROVED[:-1]},
        {"rules": True},
        {"rules": 1.0},
        {"rules": "1"},
        {"note": "trust me"},
        {"links": "rank"},
        {"links": "none"},
        {"links": None},
    ],
    ids=str,
)
def test_a_certificate_that_says_anything_else_is_refused(lie: dict[str, Any], tmp_path: Path) -> None:
    """More proved than was, a number that only compares equal, another digest: the file is not what verify wrote."""
    path = tmp_path / "program.json"
    program = lower(build("zb-v", 3, 4))
    verify(program)
    program.save(path)
    changed(path, certificate=json.loads(path.read_text())["certificate"] | lie)
    with pytest.raises(ScheduleError, match="certificate"):
        Schedule.load(path)


def test_a_certificate_says_for_which_links_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    program = lower(build("gpipe", 3, 4))
    found = {links: verify(program, links=links) for links in module.LINKS}
    assert [certificate.links for certificate in found.values()] == ["direction", "pair", "rank"]
    assert len({certificate.proved for certificate in found.values()}) == 3
    assert "one stream for both directions between two ranks together" in found["pair"].proved[-1]
    for certificate in found.values():
        certificate.check(program)
    program.save(path)  # with the last one
    assert Schedule.load(path).certificate == found["rank"]


def test_a_certificate_from_before_there_were_kinds_of_links_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    verify(PROGRAM)
    PROGRAM.save(path)
    changed(path, certificate={"digest": "0" * 32, "proved": [], "rules": 1})
    assert Schedule.load(path).certificate is None


def test_the_certificate_of_another_schedule_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, name in zip(paths, ("1f1b", "zb-h1"), strict=True):
        program = lower(build(name, 2, 3))
        verify(program)
        program.save(path)
    changed(paths[0], certificate=json.loads(paths[1].read_text())["certificate"])
    with pytest.raises(ScheduleError, match="the certificate is for another schedule"):
        Schedule.load(paths[0])
    changed(paths[0], certificate=None)
    with pytest.raises(NotationError, match="not complete"):
        Schedule.load(paths[0])


@pytest.mark.parametrize(
    "facts",
    [{"microbatches": 4}, {"recompute": [0]}, {"passes": []}, {"placement": [0, 1, 1]}, {"edges": []}],
    ids=str,
)
def test_every_fact_of_the_file_is_under_the_certificate(facts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    program = lower(build("1f1b", 2, 3))
    verify(program)
    program.save(path)
    changed(path, **facts)
    with pytest.raises(ScheduleError):
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
