"""A trained model in one piece, from a checkpoint of any layout, ready to write text.

The built-in GPT is put together from the files alone, without torch, which would take longer to load than a page
takes to write. A model of transformers is built by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.checkpoint.disk.arrays import read_arrays
from penstock.checkpoint.disk.manifest import read_manifest
from penstock.errors import UsageError
from penstock.files.adapters import ADAPTER, is_adapter, name_without_adapter, scale_of
from penstock.train.config.read import checked, read_config
from penstock.train.config.settings import GPTOptions, TrainConfig
from penstock.train.config.source import HUGGINGFACE
from penstock.train.generation.codec import Codec, codec_of
from penstock.train.generation.gpt_cache import Array, CachedGPT
from penstock.train.generation.sampling import Sampling

Continue = Callable[[list[list[int]], int, Sampling], Iterator[tuple[int, int]]]


def saved_config(checkpoint: Path) -> TrainConfig:
    """The configuration that a checkpoint was trained with."""
    document: Any = read_manifest(checkpoint).config
    if not isinstance(document, dict) or "model" not in document:
        raise UsageError(f"{checkpoint} was not saved by penstock train: it has no configuration in it")
    return read_config(document, str(checkpoint))


@dataclass(frozen=True)
class Writer:
    """A model that writes: what its tokens mean, and `continue_rows`, which gives (row, token) as they come."""

    codec: Codec
    continue_rows: Continue


def open_writer(checkpoint: Path, threads: int | None = None) -> Writer:
    """The model of a checkpoint, what its tokens mean, and how it goes on."""
    config, origin = saved_config(checkpoint), read_manifest(checkpoint).origin
    if config.model.source == "gpt":
        codec = codec_of(config, origin)
        return Writer(codec, _rows_in_turn(open_gpt(checkpoint, config, origin), codec.end))
    if config.model.source.startswith(HUGGINGFACE):
        from penstock.train.generation.of_transformers import continue_together, open_model  # loads torch

        codec, model = codec_of(config, origin), open_model(checkpoint, config, threads)
        return Writer(codec, partial(continue_together, model, codec.end))
    raise UsageError(
        f"{checkpoint} is of {config.model.source}; text can be sampled from the built-in GPT and from models of "
        f"transformers"
    )


def open_gpt(checkpoint: Path, config: TrainConfig, origin: Mapping[str, Any] | None) -> CachedGPT:
    """The built-in GPT; adapters are added to its weights."""
    arrays = read_arrays(checkpoint)
    heads = checked(GPTOptions, config.model.options, "model.options").heads
    weights: dict[str, Array] = {
        name_without_adapter(name): value for name, value in arrays.items() if not is_adapter(name)
    }
    for name in (name for name in arrays if name.endswith(f".lora_A.{ADAPTER}.weight")):
        place = name.partition(".lora_A.")[0]
        down, up = arrays[name], arrays[f"{place}.lora_B.{ADAPTER}.weight"]
        scale = scale_of(place, len(down), (origin or {})["adapter"])
        weights[f"{place}.weight"] = weights[f"{place}.weight"] + (up @ down) * down.dtype.type(scale)
    return CachedGPT(weights, heads)


def _rows_in_turn(model: CachedGPT, end: int | None) -> Continue:
    def continue_rows(prompts: list[list[int]], count: int, sampling: Sampling) -> Iterator[tuple[int, int]]:
        for row, prompt in enumerate(prompts):
            own = replace(sampling, seed=sampling.seed + row)
            for token in model.continue_tokens(prompt, count, own, end):
                yield row, token

    return continue_rows
