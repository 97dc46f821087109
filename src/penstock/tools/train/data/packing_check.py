"""Whether a model keeps packed documents apart: asked of the model itself, before the first step.

A model that masks by positions gives a document the same scores whatever lies before it in its row, and the same as at
the beginning of a row. One that does not (a recurrence, or positions of its own) would train on what leaks from one
document into the next without a sign of it in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.processes import Processes
from penstock.errors import ModelError
from penstock.pipeline import Pipeline
from penstock.tools.train.config.device import precision_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.documents import Document
from penstock.tools.train.data.layouts import Packed, Row
from penstock.tools.train.loss import scores_of, shares_of

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
