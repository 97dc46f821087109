"""Which runs of a model's code count, on each thread by itself."""

from __future__ import annotations

import threading

import pytest

from penstock.model.run_kind import DRY, EVERYWHERE, run_as, run_kind


def test_inside_of_a_dry_run_nothing_counts() -> None:
    with run_as(DRY):
        with run_as(None):
            assert run_kind() == DRY
        with run_as(EVERYWHERE):
            assert run_kind() == DRY
    assert run_kind() is None


def test_a_unit_counts_between_code_that_runs_everywhere() -> None:
    with run_as(EVERYWHERE):
        with run_as(None):
            assert run_kind() is None
        assert run_kind() == EVERYWHERE


def test_an_error_and_another_thread_leave_it_alone() -> None:
    found: list[str | None] = []
    other = threading.Thread(target=lambda: found.append(run_kind()))
    with run_as(DRY):
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), run_as(DRY):
        _ = 1 / 0
    assert found == [None]
    assert run_kind() is None
