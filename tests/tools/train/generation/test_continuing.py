"""Which token comes next: by temperature, among the likeliest, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import UsageError
from penstock.tools.train.generation.continuing import Sampling


def test_shares_are_those_of_the_likeliest() -> None:
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    np.testing.assert_allclose(Sampling(temperature=1).shares(scores), [0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(Sampling(temperature=1, top_k=2).shares(scores), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(Sampling(temperature=1, top_p=0.6).shares(scores), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(Sampling(temperature=1, top_p=0.01).shares(scores), [0, 1, 0, 0])
    np.testing.assert_allclose(Sampling(temperature=0.5).shares(scores), np.array([1, 16, 4, 9]) / 30)
    generator = np.random.default_rng(0)
    counts = np.bincount([Sampling(temperature=1).choose(scores, generator) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.1, 0.4, 0.2, 0.3], atol=0.03)
    for wrong in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(UsageError):
            Sampling(**wrong)


def test_a_temperature_near_zero_takes_the_likeliest() -> None:
    """Scores divided by it were infinite, and their differences no numbers."""
    scores = np.array([3.0, 5.0, 4.0], dtype=np.float32)
    np.testing.assert_array_equal(Sampling(temperature=1e-310).shares(scores), [0, 1, 0])
    np.testing.assert_array_equal(Sampling(temperature=1e-310, top_k=2, top_p=0.9).shares(scores), [0, 1, 0])
