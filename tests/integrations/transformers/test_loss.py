"""The loss of a Trainer as the loss of a pipeline: who computes it, and how the values of microbatches make one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazily import lazily

hf = lazily("integrations.hugging_face")
INPUTS = {"input_ids": 1, "labels": 2}


def loss_of(**changes: Any) -> Any:
    usual = {
        "compute_loss_func": None,
        "label_smoother": None,
        "model_accepts_loss_kwargs": True,
        "loss_is_scaled_for_ga": None,
        "model": hf.llama(),
    }
    return hf.TrainerLoss(SimpleNamespace(**{**usual, **changes}))


def smoother(output: Any, target: Any, shift_labels: bool, num_items_in_batch: Any = None) -> Any:
    return output, target, shift_labels, num_items_in_batch


smoother.ignore_index = -100  # type: ignore[attr-defined]


def test_a_model_that_is_passed_labels_computes_its_own_loss() -> None:
    loss = loss_of()
    assert loss.options == {}
    assert loss.call(INPUTS, None) == INPUTS
    assert loss.call(INPUTS, 7) == {**INPUTS, "num_items_in_batch": 7}


def test_labels_go_beside_the_model_to_a_function_of_its_output() -> None:
    loss = loss_of(compute_loss_func=lambda output, target, num_items_in_batch: (output, target, num_items_in_batch))
    call = loss.call(INPUTS, 7)
    assert call == {"input_ids": 1, "num_items_in_batch": 7, "target": 2, "loss_kwargs": {"num_items_in_batch": 7}}
    assert loss.options["loss_fn"]("logits", 2, num_items_in_batch=7) == ("logits", 2, 7)
    assert loss.options["loss_options"].reduction == "sum"  # each is divided by the items of the whole batch


def test_label_smoothing_of_a_model_that_takes_no_counts_weighs_by_the_labels_that_count() -> None:
    loss = loss_of(label_smoother=smoother, model_accepts_loss_kwargs=False)
    assert loss.call(INPUTS, 7)["loss_kwargs"] == {"num_items_in_batch": 7}
    assert loss.options["loss_fn"]("logits", 2)[2]  # labels of a causal model are shifted
    labels = torch.tensor([[5, -100, 6, 7]])
    assert loss.options["loss_options"].weight(labels) == 2  # without the first, and without what is ignored


@pytest.mark.parametrize(
    ("changes", "items", "scaled"),
    [
        ({}, 7, True),
        ({}, None, False),
        ({"model_accepts_loss_kwargs": False}, 7, False),
        ({"compute_loss_func": print}, None, True),
        ({"loss_is_scaled_for_ga": True}, None, True),
    ],
)
def test_losses_of_accumulated_batches_add_up_where_they_were_divided_already(
    changes: dict[str, Any], items: int | None, scaled: bool
) -> None:
    assert loss_of(**changes).is_scaled(items) is scaled
