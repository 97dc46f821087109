"""Whether a run's data and its model go together: the tokens, their positions, and documents that share a row.

A token beyond a model's table is an error from deep inside the first stage, or on a GPU the end of the process; so it
is looked for before anything runs. A model that masks by positions gives a packed document the same scores whatever
lies before it in its row, and the same as at the beginning of a row. One that does not (a recurrence, or positions of
its own) would train on what leaks from one document into the next without a sign of it in the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.processes import Processes
from penstock.errors import ModelError, UsageError
from penstock.pipeline import Pipeline
from penstock.tools.train.config.device import precision_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batches import TokenBatches
from penstock.tools.train.data.documents import Document
from penstock.tools.train.data.layouts import Packed, Row
from penstock.tools.train.data.row_batches import RowBatches
from penstock.tools.train.data.tokenizer import open_tokenizer
from penstock.tools.train.loss import scores_of, shares_of


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


# Scores may change by this share of their size with another document in front, which is not exactly 0.
LEAK = 1e-5
# They may change more with another place in the row, where sums have another order.
SHIFT, SHIFT_OF_COARSE = 1e-3, 0.1
LENGTH = 16  # tokens of a row that is asked about


def check_packing(pipe: Pipeline, config: TrainConfig, vocabulary: int) -> None:
    """Raise ModelError where documents that share a row influence each other; the same on every rank."""
    length, stacked = min(config.data.sequence, LENGTH), config.model.source == "gpt"
    if length < 4 or vocabulary < 4:
        return
    front = length // 2
    numbers = torch.arange(length, dtype=torch.int32, device="cpu")
    one, other = numbers[:front] % vocabulary, (3 * numbers[:front] + 1) % vocabulary
    asked = (numbers[front:] * 5 + 2) % vocabulary
    rows = [(one, asked), (other, asked), (asked, one)]
    scores = [_scores(pipe, [Document(each, each) for each in row], Packed(length, stacked=stacked)) for row in rows]
    worst = None
    if scores[0] is not None and scores[1] is not None and scores[2] is not None:
        behind, behind_other, begun = scores[0][front:], scores[1][front:], scores[2][: length - front]
        size = behind.abs().max().item() or 1.0
        allowed = SHIFT if precision_of(config) == "fp32" else SHIFT_OF_COARSE
        worst = [
            (behind - behind_other).abs().max().item() / size / LEAK,
            (behind - begun).abs().max().item() / size / allowed,
        ]
    answers = [each for each in Processes(pipe, "penstock train").exchange(worst) if each is not None]
    leak, shift = (max(each[kind] for each in answers) for kind in (0, 1))
    if leak > 1 or shift > 1:
        what = "another one in front of it" if leak > 1 else "its place in the row"
        raise ModelError(
            f"data.packing: {config.model.source} does not keep the documents of a row apart: the scores of one change "
            f"with {what}, because the model does not mask by position_ids; set data.packing to false (rows are then "
            f"padded, and data.max_tokens puts rows of similar length together)"
        )


def _scores(pipe: Pipeline, row: Row, layout: Packed) -> Tensor | None:
    """Compute the scores of a row's places, on the rank of the last stage."""
    batch = layout.batch([row])
    (share,) = shares_of(pipe.loss_fn, [batch.target])
    result = pipe.evaluate(*batch.args, target=batch.target, loss_kwargs=share, outputs=True, **batch.kwargs)
    return None if result.output is None else scores_of(result.output)[0]
