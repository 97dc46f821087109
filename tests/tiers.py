"""The tiers of tests: fast by default, `slow`, and `exhaustive`: every case of which the others run a part."""

from __future__ import annotations

import itertools
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


def by_turns(*values: Iterable[Any], fast: Iterable[Any] = (), one_in: int = 2) -> list[Any]:
    """Return all combinations of values as parameters, of which the slow tests have one in so many.

    Those of `fast` are in the fast tests; the others are chosen along diagonals, so that all values have their turn.
    What is not chosen is only in the exhaustive tests. A value that is a tuple is several parameters.
    """
    often, found, lists = [_tuple(case) for case in fast], [], [list(each) for each in values]
    for places in itertools.product(*(range(len(each)) for each in lists)):
        case = tuple(itertools.chain(*(_tuple(each[at]) for each, at in zip(lists, places, strict=True))))
        is_fast = case in often
        if is_fast:
            often.remove(case)
        found.append(pytest.param(*case, marks=[] if is_fast else slow_if(sum(places) % one_in == 0)))
    assert often == []
    return found


def in_tiers(cases: Iterable[Any], fast: Iterable[Any], exhaustive: Iterable[Any]) -> list[Any]:
    """All cases as parameters: some in the fast tests, some only in the exhaustive ones, all others in the slow."""
    often, seldom = list(fast), list(exhaustive)
    return [pytest.param(*_tuple(case), marks=[] if case in often else slow_if(case not in seldom)) for case in cases]


def _parameters(cases: list[Any], few: tuple[Any, ...], theirs: list[Any], others: list[Any]) -> list[Any]:
    assert [case for case in few if case not in cases] == []
    return [pytest.param(*_tuple(case), marks=theirs if case in few else others) for case in cases]


def _tuple(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
