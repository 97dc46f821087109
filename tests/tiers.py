"""The tiers of tests: fast by default, `slow`, and `exhaustive`: every case of which the others run a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(slow: Any, exhaustive: Any) -> list[Any]:
    """A parameter's value in the slow tests, and in the exhaustive ones."""
    return [pytest.param(slow, marks=pytest.mark.slow), pytest.param(exhaustive, marks=pytest.mark.exhaustive)]


def slow_if(often: bool) -> pytest.MarkDecorator:
    """A long case's tier: slow, or only exhaustive."""
    return pytest.mark.slow if often else pytest.mark.exhaustive


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """All cases as parameters: these few in the fast tests, the others in the slow ones."""
    return _parameters(list(cases), fast, [], [pytest.mark.slow])


def mostly_exhaustive(cases: Iterable[Any], *slow: Any) -> list[Any]:
    """All cases as parameters: these few in the slow tests, the others only in the exhaustive ones."""
    return _parameters(list(cases), slow, [pytest.mark.slow], [pytest.mark.exhaustive])


def in_tiers(cases: Iterable[Any], fast: Iterable[Any], exhaustive: Iterable[Any]) -> list[Any]:
    """All cases as parameters: some in the fast tests, some only in the exhaustive ones, all others in the slow."""
    often, seldom = list(fast), list(exhaustive)
    return [
        pytest.param(
            *case if isinstance(case, tuple) else (case,), marks=[] if case in often else slow_if(case not in seldom)
        )
        for case in cases
    ]


def _parameters(cases: list[Any], few: tuple[Any, ...], theirs: list[Any], others: list[Any]) -> list[Any]:
    assert [case for case in few if case not in cases] == []
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=theirs if case in few else others)
        for case in cases
    ]
