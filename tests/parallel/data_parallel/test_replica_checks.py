"""What copies of a stage tell each other, compared: samples that drift, batches and gradients that differ."""

from __future__ import annotations

from penstock.parallel.data_parallel.replica_checks import other_batches, other_gradients, samples_alike


def test_samples_may_drift_by_rounding_and_no_more() -> None:
    one = ("weight", [1.0, 2.0], 1e-3)
    assert samples_alike(one, ("weight", [1.0, 2.0 + 1e-4], 1e-3))
    assert not samples_alike(one, ("weight", [1.0, 2.1], 1e-3))
    assert samples_alike(one, ("bias", [9.0], 1e-3))  # of a step that one of them has tried once more


def test_ranks_of_the_tp_axis_have_one_batch_and_one_gradient_of_what_they_hold_whole() -> None:
    assert other_batches([({}, 0), ({}, 0)]) is None
    for seen in ([({}, 0), ({}, 1)], [({"x": ()}, 0), ({}, 0)]):
        assert "were given different batches, or loaded different states" in str(other_batches(seen))
    assert other_gradients([{"norm.weight": 1.0}, {"norm.weight": 1.0 + 1e-5}]) is None
    assert "the gradient of norm.weight differs" in str(other_gradients([{"norm.weight": 1.0}, {"norm.weight": 1.1}]))
    assert "the gradient of norm.weight differs" in str(other_gradients([{"norm.weight": 1.0}, {}]))
