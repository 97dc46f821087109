"""A trained model of transformers that continues several rows at once, with a cache of keys and values.

transformers chooses the cache that fits the model. Rows are padded on the left, so that the next token is at the same
place for all, and each row draws with a generator of its own: what it becomes does not depend on its neighbours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.checkpoint.load.reading import CheckpointContents, open_whole
from penstock.checkpoint.named_tensors import AVERAGE
from penstock.errors import UsageError
from penstock.files.adapters import is_adapter
from penstock.train.config.settings import TrainConfig
from penstock.train.data.vocabulary import positions_of
from penstock.train.generation.sampling import Sampling
from penstock.train.models.huggingface import build_huggingface, left_out, values_of
from penstock.train.models.lora import add_adapters, has_adapters

log = logging.getLogger("penstock.train")


def open_model(checkpoint: Path, config: TrainConfig, threads: int | None = None) -> nn.Module:
    """The model of a checkpoint in one piece, with its adapters."""
    if threads is not None:
        torch.set_num_threads(threads)
    _, contents = open_whole(checkpoint)
    model = build_huggingface(config)
    if has_adapters(config):
        model = add_adapters(config, model)
    read, leaves_out = values_of(config, model), left_out(config)
    if read is not None:  # it was built without memory
        for name, parameter in list(model.named_parameters()):
            own = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
            if leaves_out is not None and not is_adapter(name):
                read(name, own)
            _put(model, parameter, own)
    _fill(model, contents, leaves_out)
    return model.eval()


def _put(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """In every place of the model that has `old`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _fill(model: nn.Module, contents: CheckpointContents, leaves_out: Callable[[str], bool] | None) -> None:
    """All values of the checkpoint into the model; a tied parameter is there under one of its names."""
    state, filled = model.state_dict(keep_vars=True), set()
    with torch.no_grad():
        for name, value in state.items():
            keys = [key for key in (f"{AVERAGE}{name}", f"model.{name}") if key in contents.tensors]
            if keys:  # the average, where there is one: as in evaluations
                value.copy_(contents.tensor(keys[0]))
                filled.add(id(value))
    missing = [name for name, value in state.items() if id(value) not in filled]
    missing = [name for name in missing if leaves_out is None or not leaves_out(name)]
    if missing:
        raise UsageError(f"{contents.path} has no values for {', '.join(missing[:5])}")


def continue_together(
    model: Any, end: int | None, prompts: list[list[int]], count: int, sampling: Sampling
) -> Iterator[tuple[int, int]]:
    """(row, token) of all rows, token by token; a row that has come to its end adds no more."""
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
    """UsageError where a text would go beyond a model's table of positions; a warning where it computes them."""
    known, has_table = positions_of(model)
    if known is None or longest + count <= known + 1:  # the last token is not read again
        return
    room = known + 1 - longest
    remedy = f"--tokens {room} is the most" if room > 0 else "give a shorter one"
    beyond = f"a prompt of {longest} tokens and {count} more go beyond the {known} positions that the model"
    if has_table:
        raise UsageError(f"{beyond} knows; {remedy}")
    log.warning(f"warning: {beyond} was made for (max_position_embeddings); within them, {remedy}")
