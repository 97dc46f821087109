"""A trained model of transformers that continues several rows at once, with a cache of keys and values.

transformers chooses the cache that fits the model. Rows are padded on the left, so that the next token is at the same
place for all, and each row draws with a generator of its own: what it becomes does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.errors import UsageError
from penstock.tools.train.data.vocabulary import positions_of
from penstock.tools.train.generation.sampling import Sampling

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
