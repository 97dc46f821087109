"""Text after a prompt, token by token: how tokens are drawn, and the models that score them, with caches.

The built-in GPT knows nothing of a cache: its attention is seen as the function that it calls, which then gets the keys
and values of earlier tokens as well. Positions are absolute: when a row has reached the model's context, its last half
is read again from position 0, and between these moments a token costs one row of each product.

A model of transformers continues several rows at once, with the cache that transformers chooses. Rows are padded on the
left, so that the next token is at the same place for all, and each row draws with a generator of its own: what it
becomes does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from penstock.errors import UsageError
from penstock.tools.train.data.vocabulary import positions_of


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


log = logging.getLogger("penstock.train")


def continue_together(
    model: Any, end: int | None, prompts: list[list[int]], count: int, sampling: Sampling
) -> Iterator[tuple[int, int]]:
    """Yield (row, token) of all rows, token by token; a row that has come to its end adds no more."""
    longest = max(map(len, prompts))
    _check_length(model, longest, count)
    fresh = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device="cpu")
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device="cpu")
    padded = longest != min(map(len, prompts))
    generators = [np.random.default_rng(sampling.seed + row) for row in range(len(prompts))]
    going = dict.fromkeys(range(len(prompts)))
    cache: Any = None
    with torch.inference_mode():
        for _ in range(count):
            places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]} if padded else {}
            output = model(input_ids=fresh, attention_mask=mask, past_key_values=cache, use_cache=True, **places)
            cache = output.past_key_values
            scores = output.logits[:, -1].float().numpy()
            chosen = [0] * len(prompts)
            for row in list(going):
                chosen[row] = sampling.choose(scores[row], generators[row])
                yield row, chosen[row]
                if chosen[row] == end:
                    del going[row]
            if not going:
                return
            fresh = torch.tensor(chosen, device="cpu")[:, None]
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype, device="cpu")], dim=1)


def _check_length(model: Any, longest: int, count: int) -> None:
    """Raise UsageError where a text would go beyond a model's table of positions; warn where it computes them."""
    known, has_table = positions_of(model)
    if known is None or longest + count <= known + 1:  # the last token is not read again
        return
    room = known + 1 - longest
    remedy = f"--tokens {room} is the most" if room > 0 else "give a shorter one"
    beyond = f"a prompt of {longest} tokens and {count} more go beyond the {known} positions that the model"
    if has_table:
        raise UsageError(f"{beyond} knows; {remedy}")
    log.warning(f"warning: {beyond} was made for (max_position_embeddings); within them, {remedy}")
