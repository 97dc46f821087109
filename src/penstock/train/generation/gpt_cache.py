"""The built-in GPT token by token, in numpy, with the keys and values of earlier tokens kept.

A small model writes a page in less time than torch takes to load, so this is the arithmetic of `train.models.gpt` once
more, on arrays; a test holds the two together. Positions are absolute: when a row has reached the model's
context, its last half is read again from position 0, and between these moments a token costs one row of each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.train.generation.sampling import Sampling

Array = NDArray[Any]
EPSILON = 1e-5  # of torch's layer norms


class CachedGPT:
    """The model as arrays by name, and what it has read so far.

    Args:
        weights: The model's parameters, by their names.
        heads: Attention heads per block.
    """

    def __init__(self, weights: Mapping[str, Array], heads: int) -> None:
        self._weights, self._heads = weights, heads
        self.layers = sum(name.endswith(".join.weight") for name in weights)
        self.context, self._width = weights["embed.place.weight"].shape
        size = self._width // heads
        kind = weights["embed.place.weight"].dtype
        self._keys = np.empty((self.layers, heads, self.context, size), kind)
        self._values = np.empty_like(self._keys)
        self.length = 0  # tokens that it has read

    def continue_tokens(
        self, prompt: Sequence[int], count: int, sampling: Sampling, end: int | None = None
    ) -> Iterator[int]:
        """Tokens that follow the prompt, one by one, until `end` if there is one."""
        generator = np.random.default_rng(sampling.seed)
        tokens = list(prompt)[-self.context :]
        self.length = 0
        scores = self.read(tokens)
        for number in range(count):
            chosen = sampling.choose(scores, generator)
            yield chosen
            if chosen == end or number + 1 == count:
                return
            tokens.append(chosen)
            if len(tokens) > self.context:
                tokens = tokens[-max(1, self.context // 2) :]
                self.length = 0
                scores = self.read(tokens)
            else:
                scores = self.read([chosen])

    def read(self, tokens: Sequence[int]) -> Array:
        """Read further tokens; the score of each token that may come next."""
        weights, begin, end = self._weights, self.length, self.length + len(tokens)
        x: Array = weights["embed.token.weight"][list(tokens)] + weights["embed.place.weight"][begin:end]
        later = None
        if len(tokens) > 1:  # what comes later than a token, it does not see
            later = np.arange(end)[None, :] > np.arange(begin, end)[:, None]
        for layer in range(self.layers):
            x = x + self._linear(f"block{layer}.join", self._attend(layer, x, begin, end, later))
            hidden = self._linear(f"block{layer}.widen", self._norm(f"block{layer}.before_network", x))
            x = x + self._linear(f"block{layer}.narrow", _gelu(hidden))
        self.length = end
        last: Array = self._norm("head.norm", x[-1:])
        found: Array = (last @ weights["head.scores.weight"].T)[0]
        return found

    def _attend(self, layer: int, x: Array, begin: int, end: int, later: Array | None) -> Array:
        projected = self._linear(f"block{layer}.project", self._norm(f"block{layer}.before_attention", x))
        parts = projected.reshape(len(x), self._heads, 3, -1).transpose(2, 1, 0, 3)
        self._keys[layer, :, begin:end], self._values[layer, :, begin:end] = parts[1], parts[2]
        keys, values = self._keys[layer, :, :end], self._values[layer, :, :end]
        scores = parts[0] @ keys.transpose(0, 2, 1) / np.sqrt(keys.shape[2], dtype=x.dtype)
        if later is not None:
            scores[:, later] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        found: Array = (scores @ values).transpose(1, 0, 2).reshape(len(x), -1)
        return found

    def _linear(self, name: str, x: Array) -> Array:
        found: Array = x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return found

    def _norm(self, name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(EPSILON))
        found: Array = x * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return found


def _gelu(x: Array) -> Array:
    inner = x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    found: Array = x.dtype.type(0.5) * x * (1 + np.tanh(inner))
    return found
