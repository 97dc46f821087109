"""Whether the tokens that a run reads, and their positions, are among those that its model knows.

A token beyond a model's table is an error from deep inside the first stage, or on a GPU the end of the process; so it
is looked for before anything runs.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.errors import UsageError
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batches import TokenBatches
from penstock.tools.train.data.row_batches import RowBatches
from penstock.tools.train.data.tokenizer import open_tokenizer


def vocabulary_of(model: nn.Module) -> int | None:
    """Return how many tokens a model knows; None where that is not known."""
    ask = getattr(model, "get_input_embeddings", None)
    try:
        table: Any = None if ask is None else ask()
    except NotImplementedError:
        table = None
    if table is None:
        table = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
        return table.num_embeddings if table is not None and isinstance(model, nn.Sequential) else None
    found = getattr(table, "num_embeddings", None)
    return None if found is None else int(found)


def check_vocabulary(config: TrainConfig, model: nn.Module, data: Any) -> None:
    """Raise UsageError where the tokenizer, or a row of tokens, has numbers that the model does not know."""
    if isinstance(data, RowBatches | TokenBatches):
        check_positions(config, model)
    known = vocabulary_of(model)
    if known is None:
        return
    if isinstance(data, RowBatches):  # what a tokenizer knows besides does not matter
        data.limit = known  # Streamed rows are read later.
        data.check_limit()
    elif config.data.tokenizer:
        tokens = open_tokenizer(config.data.tokenizer, config.data.end).vocabulary
        if tokens > known:
            name = "vocabulary" if config.model.source == "gpt" else "vocab_size"
            raise UsageError(
                f"the tokenizer in {config.data.tokenizer} has {tokens} tokens, the model knows {known}; take the "
                f"tokenizer that was saved with the model, or model.options.{name}={tokens} with random weights"
            )


def positions_of(model: Any) -> tuple[int | None, bool]:
    """Return the positions a model was made for, if known; and whether it has a table of them, and thus no more."""
    known = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(known, int):
        return None, False
    words = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not words]
    return known, any(known <= each.num_embeddings <= known + 2 for each in tables)  # some keep two for padding


def check_positions(config: TrainConfig, model: Any) -> None:
    """Raise UsageError where rows may be longer than a model's table of positions."""
    known, has_table = positions_of(model)
    if known is not None and has_table and config.data.sequence > known:
        raise UsageError(
            f"data.sequence is {config.data.sequence}, and {type(model).__name__} of {config.model.source} has a table "
            f"of {known} positions; set data.sequence to {known} or less"
        )


def position_warning(model: Any, data: Any) -> str:
    """Warn where a model computes its positions, and rows go beyond those that it was made for; else return no text."""
    known, _ = positions_of(model)
    longest = data.longest if isinstance(data, RowBatches | TokenBatches) else 0
    if known is None or longest <= known:
        return ""
    return (
        f"warning: rows have up to {longest:,} tokens, and the model was made for {known:,} (max_position_embeddings): "
        f"it has not learned the positions beyond; set data.sequence to {known} or less, unless it is to learn them now"
    )
