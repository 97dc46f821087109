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
    found = list(cases)
    assert [case for case in fast if case not in found] == []
    return [
        pytest.param(*case if isinstance(case, tuple) else (case,), marks=[pytest.mark.slow] * (case not in fast))
        for case in found
    ]
