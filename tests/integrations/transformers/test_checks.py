"""What a pipeline and a Trainer cannot both do is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import lazily

from penstock.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


hf = lazily("integrations.hugging_face")


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, in double precision, divided by what the accumulated batch has."""
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def made(folder: Path, pipeline: Any = None, args: Any = None, **more: Any) -> Any:
    given = {"stages": 2} if pipeline is None else pipeline
    return hf.PipelineTrainer(
        hf.llama(), hf.arguments(folder, **(args or {})), train_dataset=hf.Text(4), pipeline=given, **more
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pipeline": {"loss_fn": summed}}, "compute_loss_func="),
        ({"pipeline": {"precision": "bf16"}}, "bf16=True"),
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size"),
        ({"args": {"torch_compile": True}}, "compile submodules"),
        ({"args": {"train_sampling_strategy": "batch_rebalance"}}, "group_by_length"),
        ({"args": {"bf16_full_eval": True}}, "use bf16=True"),
    ],
)
def test_what_would_not_train_as_it_says_is_refused(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(tmp_path, **given)


def test_a_loss_in_a_subclass_is_refused(tmp_path: Path) -> None:
    class Own(hf.PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(UsageError, match="compute_loss_func="):
        Own(hf.llama(), hf.arguments(tmp_path), train_dataset=hf.Text(4), pipeline={"stages": 2})


def test_one_process_must_say_how_many_stages(tmp_path: Path) -> None:
    trainer = made(tmp_path, pipeline={})
    with pytest.raises(UsageError, match="'stages': 4"):
        trainer.train()
    with pytest.raises(UsageError, match="no pipeline yet"):
        _ = trainer.pipe
