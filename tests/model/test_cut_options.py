"""How a model is cut, beyond where: each option that cannot work is named with what would."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import CutOptions
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "position"),
        ({"skips": [(0, 1, 2)]}, "pairs of stages"),
        ({"skips": 3}, "pairs of stages"),
        ({"speeds": ["fast"]}, "one number for each rank"),
        ({"optimizer": "newton"}, "adamw"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        CutOptions(**options)
    assert next(iter(options)) in str(refused.value)


def test_what_works_is_taken() -> None:
    assert CutOptions(method="graph", skips=[(0, 3)], speeds=[1.0, 0.5], optimizer="sgd").speeds == [1.0, 0.5]
