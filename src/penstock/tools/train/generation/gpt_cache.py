"""The built-in GPT token by token, with the keys and values of earlier tokens kept.

The model itself knows nothing of it: its attention is seen as the function that it calls, which then gets the keys and
values of earlier tokens as well. Positions are absolute: when a row has reached the model's context, its last half is
read again from position 0, and between these moments a token costs one row of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from penstock.tools.train.generation.sampling import Sampling


class KeyValueCache(TorchFunctionMode):
    """Gives each attention in a forward the keys and values that the same one had in earlier forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0  # Tokens that were read.
        self._kept: list[tuple[Tensor, Tensor]] = []  # Indexed by the number of the attention within a forward.
        self._number = 0

    def __enter__(self) -> KeyValueCache:
        self._number = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Join the keys and values of an attention; any other function is called as it is."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        if self._number < len(self._kept):
            earlier = self._kept[self._number]
            key, value = torch.cat([earlier[0], key], dim=2), torch.cat([earlier[1], value], dim=2)
            self._kept[self._number] = (key, value)
        else:
            self._kept.append((key, value))
        self._number += 1
        return func(query, key, value, attn_mask=causal_lower_right(query.shape[2], key.shape[2]))


class CachedGPT:
    """The model, and what it has read so far."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.context = int(model.embed.place.num_embeddings)  # type: ignore[union-attr, arg-type]
        self._cache = KeyValueCache()

    def continue_tokens(
        self, prompt: Sequence[int], count: int, sampling: Sampling, end: int | None = None
    ) -> Iterator[int]:
        """Yield the tokens that follow the prompt, one by one, until `end` if there is one."""
        generator = np.random.default_rng(sampling.seed)
        tokens = list(prompt)[-self.context :]
        self._cache = KeyValueCache()
        scores = self.read(tokens)
        for number in range(count):
            chosen = sampling.choose(scores.float().numpy(), generator)
            yield chosen
            if chosen == end or number + 1 == count:
                return
            tokens.append(chosen)
            if len(tokens) > self.context:
                tokens = tokens[-max(1, self.context // 2) :]
                self._cache = KeyValueCache()
                scores = self.read(tokens)
            else:
                scores = self.read([chosen])

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read further tokens, and return the score of each token that may come next."""
        begin = self._cache.length
        self._cache.length += len(tokens)
        positions = torch.arange(begin, self._cache.length, device="cpu")
        row = torch.stack([torch.tensor(list(tokens), device="cpu"), positions])
        with torch.inference_mode(), self._cache:
            scores: Tensor = self._model(row[None])[0, -1]
        return scores
