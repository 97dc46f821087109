"""Places of tensors: causes come before what they cause."""

from __future__ import annotations

from penstock.tools.parity_check.tensor_trace import AFTER, TensorPlace


def test_places_are_ordered_upstream_first_and_say_where_they_are() -> None:
    forward = [TensorPlace(0, 0, stage, number, "output", "x") for stage in (0, 1) for number in (0, 1)]
    backward = [TensorPlace(0, 1, -stage, 1, "gradient", "x") for stage in (1, 0)]
    done = TensorPlace(0, 2, 0, AFTER, "buffer", "buffer mean")
    wanted = [*forward, *backward, done, TensorPlace(1, 0, 0, 0, "output", "x")]
    assert sorted(wanted) == wanted
    assert str(backward[0]) == "step 0, stage 1, microbatch 1, x"
    assert str(done) == "step 0, stage 0, buffer mean"
