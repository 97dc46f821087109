"""`penstock rehearse`."""

from __future__ import annotations

import json

import pytest
from command import run


def said_by(*arguments: object) -> str:
    result = run("rehearse", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_a_healthy_run() -> None:
    said = said_by("1f1b", "--ranks", "2", "--microbatches", "4", "--steps", "2")
    assert "makespan    15" in said
    assert "2 of 2 completed by all ranks" in said
    assert "those of a plain loop" in said
    assert "none happened" in said


def test_a_rank_that_dies() -> None:
    said = said_by("1f1b", "--fault", "die 2 at 12.5")
    assert "died or left (its connection closed)" in said
    for rank in (0, 1, 3):
        assert f"rank {rank} knew at" in said
    assert said.count("and named rank 2") == 3
    assert "no step was completed" in said


def test_json_for_programs() -> None:
    found = json.loads(said_by("zb-v", "-r", "2", "-f", "fail 1 at 1F2", "--json"))
    assert [each["named"] for each in found["notices"]] == [1, 1]
    assert found["faults"] == ["fail 1 at 1F2"]
    assert (found["hung"], found["is_exact"], found["completed"]) == ([], True, [0, 0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1f1b", "-f", "die 9 at 1"], "there is no rank 9"),
        (["1f1b", "-f", "boom"], "is no fault"),
        (["1f1b", "--timeout", "0"], "timeout is a number of seconds above 0"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(arguments: list[str], says: str) -> None:
    result = run("rehearse", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
