"""What ranks are given for a step."""

from __future__ import annotations

from penstock.runtime.engine.step_input import Refused


def test_a_batch_that_is_refused_is_refused_on_every_rank() -> None:
    refused = Refused(ValueError("no rows"))
    assert [refused[rank] for rank in (0, 3)] == [refused, refused]
