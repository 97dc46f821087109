"""A trained model in one piece, from a checkpoint of any layout, ready to write text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.checkpoint.disk.manifest import read_manifest
from penstock.checkpoint.load.reading import CheckpointContents, open_whole
from penstock.checkpoint.named_tensors import AVERAGE
from penstock.errors import UsageError
from penstock.files.adapters import is_adapter, name_without_adapter
from penstock.train.build import build_model, gpt_options
from penstock.train.config.consistent import check_model
from penstock.train.config.read import read_config
from penstock.train.config.settings import TrainConfig
from penstock.train.config.source import HUGGINGFACE
from penstock.train.generation.codec import Codec, codec_of
from penstock.train.generation.gpt_cache import CachedGPT
from penstock.train.generation.of_transformers import continue_together
from penstock.train.generation.sampling import Sampling
from penstock.train.models.huggingface import left_out, values_of

Continue = Callable[[list[list[int]], int, Sampling], Iterator[tuple[int, int]]]


def saved_config(checkpoint: Path) -> TrainConfig:
    """The configuration that a checkpoint was trained with."""
    document: Any = read_manifest(checkpoint).config
    if not isinstance(document, dict) or "model" not in document:
        raise UsageError(f"{checkpoint} was not saved by penstock train: it has no configuration in it")
    return read_config(document, str(checkpoint))


def check_sizes(config: TrainConfig, contents: CheckpointContents) -> None:
    """Refuse a configuration whose sizes a checkpoint's tensors do not have, before memory is asked for by it."""
    check_model(config, f"the configuration for {contents.path}")
    if config.model.source != "gpt":
        return
    options = gpt_options(config)
    shapes = {name_without_adapter(name): saved["shape"] for name, saved in contents.tensors.items()}
    vocabulary, width = (*shapes.get("model.embed.token.weight", ()), 0, 0)[:2]
    context = (*shapes.get("model.embed.place.weight", ()), 0)[0]
    layers = len({name.split(".")[1] for name in shapes if name.startswith("model.block")})
    found = {"layers": layers, "width": width, "vocabulary": vocabulary, "context": context}
    asked = {name: getattr(options, name) or config.data.sequence for name in found}
    wrong = [
        f"model.options.{name} is {asked[name]}, not {size}" for name, size in found.items() if asked[name] != size
    ]
    if wrong:
        raise UsageError(f"{contents.path} holds another model than its configuration describes: {'; '.join(wrong)}")


@dataclass(frozen=True)
class Writer:
    """A model that writes: what its tokens mean, and `continue_rows`, which gives (row, token) as they come."""

    codec: Codec
    continue_rows: Continue


def open_model(checkpoint: Path, config: TrainConfig, threads: int | None = None) -> nn.Module:
    """The model of a checkpoint in one piece, with its adapters."""
    if threads is not None:
        torch.set_num_threads(threads)
    _, contents = open_whole(checkpoint)
    check_sizes(config, contents)
    model, _ = build_model(config)
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


def open_writer(checkpoint: Path, threads: int | None = None) -> Writer:
    """Return the model of a checkpoint, what its tokens mean, and how it goes on."""
    config, origin = saved_config(checkpoint), read_manifest(checkpoint).origin
    built_in = config.model.source == "gpt"
    if not built_in and not config.model.source.startswith(HUGGINGFACE):
        raise UsageError(
            f"{checkpoint} is of {config.model.source}; text can be sampled from the built-in GPT and from models of "
            f"transformers"
        )
    codec, model = codec_of(config, origin), open_model(checkpoint, config, threads)
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
