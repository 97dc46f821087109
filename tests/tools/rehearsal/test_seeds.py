"""Small runs of the real runtime with a fault at any point: none hangs, and each failure names the right rank."""

from __future__ import annotations

import pytest
from rehearsal_cases import draw_case, faults_of
from tiers import mostly_slow

SAMPLE = 120


@pytest.mark.parametrize("first", mostly_slow(range(0, SAMPLE, 10), 0, 10))
def test_no_run_hangs_and_the_right_rank_is_named(first: int) -> None:
    _check(range(first, first + 10))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 10_000, 200))
def test_no_run_of_ten_thousand_hangs_and_the_right_rank_is_named(first: int) -> None:
    _check(range(first, first + 200))


def _check(seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        case = draw_case(seed)
        found = faults_of(case, case.run())
        if found:
            wrong[seed] = (case.schedule.name, str(case.fault), found)
    assert not wrong
