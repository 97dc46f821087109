"""`LossOptions` refuses what cannot work when it is made, by name and value."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.runtime.loss.loss_options import LossOptions


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weight": 3}, r"LossOptions\(weight=3\): pass a function that returns a number"),
        ({"reduction": "none"}, r"reduction='none'\): choose one of None, 'mean', 'sum'"),
        ({"per_microbatch": "yes"}, r"per_microbatch='yes'\): choose one of False, True"),
        ({"weight": len, "reduction": "sum"}, "weighs the terms of a mean; .* leave one out"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LossOptions(**given)


def test_a_weight_goes_with_a_mean() -> None:
    assert LossOptions(weight=len, reduction="mean").weight is len
