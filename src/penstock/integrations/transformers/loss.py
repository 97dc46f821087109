"""The loss of a Trainer as the loss of a pipeline: computed by the last stage, once per microbatch.

A model that is passed labels computes its own. With a compute_loss_func or label smoothing the labels go beside the
model, to a function of its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.runtime.loss.loss_options import LossOptions

ITEMS = "num_items_in_batch"


class TrainerLoss:
    """How one Trainer computes its loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._beside = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        self._takes_items = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None

    @property
    def options(self) -> dict[str, Any]:
        """Of the pipeline: the loss function, if there is one, and how its values make the loss of a batch."""
        if not self._beside:
            return {}
        if self._takes_items:  # each is divided by the items of the whole batch, so they add up
            is_known = self._trainer.compute_loss_func is None  # label smoothing, which rounds to float32 in between
            return {
                "loss_fn": self._compute,
                "loss_options": LossOptions(reduction="sum", per_microbatch=is_known),
            }
        return {"loss_fn": self._compute, "loss_options": LossOptions(weight=self._counted)}

    def is_scaled(self, items: Any) -> bool:
        """Return whether the losses of accumulated batches add up as they are."""
        if self._trainer.loss_is_scaled_for_ga is not None:
            return bool(self._trainer.loss_is_scaled_for_ga)
        is_divided = self._trainer.model_accepts_loss_kwargs and items is not None
        return is_divided or self._trainer.compute_loss_func is not None

    def apart(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Separate the model's inputs from the labels, where these go beside it."""
        inputs = dict(inputs)
        return inputs, inputs.pop("labels", None) if self._beside else None

    def call(self, inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
        """Return what `pipe.step` and `pipe.evaluate` are passed for a batch."""
        inputs, labels = self.apart(inputs)
        if items is not None and self._trainer.model_accepts_loss_kwargs:
            inputs[ITEMS] = items
        if labels is None:
            return inputs
        return {**inputs, "target": labels, "loss_kwargs": {} if items is None else {ITEMS: items}}

    def _compute(self, output: Any, target: Any, num_items_in_batch: Any = None) -> Tensor:
        trainer = self._trainer
        loss: Tensor
        if trainer.compute_loss_func is not None:
            loss = trainer.compute_loss_func(output, target, num_items_in_batch=num_items_in_batch)
        else:
            loss = trainer.label_smoother(
                output, target, shift_labels=self._shifts, num_items_in_batch=num_items_in_batch
            )
        return loss

    @property
    def _shifts(self) -> bool:
        return type(self._trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _counted(self, target: Tensor) -> Tensor:
        labels = target[..., 1:] if self._shifts else target
        return labels.ne(self._trainer.label_smoother.ignore_index).sum()
