"""Which token comes next, from the scores of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: 0 for always the likeliest token; 1 for the model's own probabilities.
        top_k: Draw among this many of the likeliest tokens only.
        top_p: Draw among the likeliest tokens whose probabilities make up this share.
        seed: Where random numbers start.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature}: give a number of 0 or more, such as 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k {self.top_k}: give a whole number of at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p}: give a share above 0 and up to 1, such as 0.9")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def choose(self, scores: NDArray[Any], generator: np.random.Generator) -> int:
        """Choose one token, from the scores of all of them."""
        if self.greedy:
            return int(scores.argmax())
        shares = self.shares(scores)
        return int(np.searchsorted(shares.cumsum(), generator.random(), side="right").clip(max=len(shares) - 1))

    def shares(self, scores: NDArray[Any]) -> NDArray[np.float64]:
        """Return the probability of each token; 0 for those that are not drawn from."""
        with np.errstate(over="ignore"):  # near 0, all but the likeliest are infinitely unlikely
            scaled = (scores.astype(np.float64) - scores.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < np.partition(scaled, -self.top_k)[-self.top_k]] = -np.inf
        shares: NDArray[np.float64] = np.exp(scaled)
        shares /= shares.sum()
        if self.top_p is not None:
            order = np.argsort(-shares, kind="stable")
            before = shares[order].cumsum() - shares[order]
            shares[order[before >= self.top_p]] = 0.0  # the first always stays
            shares /= shares.sum()
        return shares
