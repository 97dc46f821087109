"""A check that goes wrong on any rank is a finding, and the next check has new ranks."""

from __future__ import annotations

from collections.abc import Iterator

import doctor_checks
import pytest

from penstock.tools.doctor.checks import compare_with_plain_loop
from penstock.tools.doctor.ranks import RankGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(2, "cpu") as group:
        yield group


def test_every_rank_answers_and_goes_on_to_the_next_check(group: RankGroup) -> None:
    for factor in (2, 3):
        answers = group.run(doctor_checks.answer, factor, limit=60)
        assert answers.figures == {0: {"value": 0}, 1: {"value": factor}}
        assert not answers.complaint


def test_a_rank_that_raises_is_reported_with_its_traceback_and_what_it_wrote(group: RankGroup) -> None:
    answers = group.run(doctor_checks.write_and_raise, limit=60)
    assert answers.complaint == "rank 1: ValueError: the product has 3 rows"
    assert "and 4 were expected" in answers.details
    assert "a library's last words" in answers.details
    assert group.run(doctor_checks.answer, 1, limit=60).figures[1] == {"value": 1}


def test_a_rank_that_dies_is_reported_with_its_signal(group: RankGroup) -> None:
    answers = group.run(doctor_checks.die, limit=60)
    assert answers.complaint == "rank 1 was killed by SIGKILL"
    assert answers.figures == {0: {}}


def test_a_rank_that_hangs_costs_the_limit_and_no_more(group: RankGroup) -> None:
    answers = group.run(doctor_checks.hang, limit=2)
    assert answers.complaint.startswith("rank 0 gave no answer within 2 s")
    assert group.run(doctor_checks.answer, 1, limit=60).figures[1] == {"value": 1}


def test_a_wrong_gradient_is_found_and_named(group: RankGroup) -> None:
    answers = group.run(doctor_checks.lose_a_microbatch, "1f1b", limit=60)
    assert "the pipeline and the plain model differ by" in answers.complaint
    assert group.run(compare_with_plain_loop, "1f1b", limit=60).figures[0]["difference"] < 1e-5
