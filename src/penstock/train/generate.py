"""Text from a trained built-in GPT: a newcomer's proof that it learned something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.manifest import read_manifest
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.train.build import build_model, gpt_options
from penstock.train.config.read import checked
from penstock.train.config.settings import TrainConfig
from penstock.train.gpt import Embed
from penstock.train.huggingface import check_base, left_out


def saved_config(checkpoint: Path) -> TrainConfig:
    """The configuration that a checkpoint was trained with."""
    document: Any = read_manifest(checkpoint).config
    if not isinstance(document, dict) or "model" not in document:
        raise UsageError(f"{checkpoint} was not saved by penstock train: it has no configuration in it")
    return checked(TrainConfig, document, str(checkpoint))


def load_for(config: TrainConfig, checkpoint: Path, pipe: Pipeline) -> int:
    """Put a checkpoint's weights into a pipeline of any layout; the step that they are from."""
    loaded = Checkpointer(checkpoint.parent, leave_out=left_out(config)).load(pipe, path=checkpoint)
    check_base(config, loaded.extra.get("base"))
    return int(loaded.step)


def open_gpt(checkpoint: Path) -> tuple[nn.Sequential, int, TrainConfig]:
    """The model of a checkpoint, in one piece; its step; its configuration."""
    config = saved_config(checkpoint)
    if config.model.source != "gpt" or gpt_options(config).vocabulary != 256:
        raise UsageError(
            f"{checkpoint} is of {config.model.source}; text can be sampled from the built-in GPT over bytes"
        )
    model, _ = build_model(config)
    assert isinstance(model, nn.Sequential)
    with Pipeline(model, stages=1, microbatches=1, transport="threads") as pipe:
        step = load_for(config, checkpoint, pipe)
    return model.eval(), step, config


def continue_text(
    model: nn.Sequential, prompt: bytes, count: int, *, temperature: float, top: int | None, seed: int
) -> Iterator[bytes]:
    """Bytes that follow the prompt, one by one; with temperature 0 always the likeliest."""
    embed = model[0]
    assert isinstance(embed, Embed)
    context = embed.place.num_embeddings
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt or b"\n")], dtype=torch.int64)
    with torch.no_grad():
        for _ in range(count):
            scores: Tensor = model(tokens[:, -context:])[0, -1]
            if temperature == 0:
                chosen = scores.argmax()
            else:
                if top is not None:
                    scores[scores < scores.topk(min(top, len(scores))).values[-1]] = -torch.inf
                chosen = torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)[0]
            tokens = torch.cat([tokens, chosen.view(1, 1)], dim=1)
            yield bytes([int(chosen)])
