"""A trained model in one piece, from a checkpoint of any layout, ready to write text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from penstock.checkpoint.disk.manifest import read_manifest
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.tools.train.build import build_model
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.evaluate import check_sizes, load_for, saved_config
from penstock.tools.train.generation.codec import Codec, codec_of
from penstock.tools.train.generation.sampling import CachedGPT, Sampling, continue_together
from penstock.tools.train.models.huggingface import values_of

Continue = Callable[[list[list[int]], int, Sampling], Iterator[tuple[int, int]]]


@dataclass(frozen=True)
class Writer:
    """A model that writes: what its tokens mean, and `continue_rows`, which gives (row, token) as they come."""

    codec: Codec
    continue_rows: Continue


def open_model(checkpoint: Path, config: TrainConfig) -> nn.Module:
    """Return the model of a checkpoint in one piece, with its adapters, as evaluations have it."""
    check_sizes(config, CheckpointContents(checkpoint))
    model, _ = build_model(config)
    example = (
        None if isinstance(model, nn.Sequential) else {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device="cpu")}
    )
    init = values_of(config, model)
    with Pipeline(model, stages=1, microbatches=1, example=example, transport="threads", init=init) as pipe:
        load_for(config, checkpoint, pipe)
    return model.eval()


def open_writer(checkpoint: Path, threads: int | None = None) -> Writer:
    """Return the model of a checkpoint, what its tokens mean, and how it goes on."""
    config, origin = saved_config(checkpoint), read_manifest(checkpoint).origin
    built_in = config.model.source == "gpt"
    if not built_in and not config.model.source.startswith(HUGGINGFACE):
        raise UsageError(
            f"{checkpoint} is of {config.model.source}; text can be sampled from the built-in GPT and from models of "
            f"transformers"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    codec, model = codec_of(config, origin), open_model(checkpoint, config)
    if built_in:
        return Writer(codec, _rows_in_turn(CachedGPT(model), codec.end))
    return Writer(codec, partial(continue_together, model, codec.end))


def _rows_in_turn(model: CachedGPT, end: int | None) -> Continue:
    def continue_rows(prompts: list[list[int]], count: int, sampling: Sampling) -> Iterator[tuple[int, int]]:
        for row, prompt in enumerate(prompts):
            own = replace(sampling, seed=sampling.seed + row)
            for token in model.continue_tokens(prompt, count, own, end):
                yield row, token

    return continue_rows
