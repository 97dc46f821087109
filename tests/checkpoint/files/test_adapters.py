"""Low-rank adapters: peft's names for them, and their sum with the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoint.files.adapters import merged, stored_names
from penstock.errors import UsageError

NAMES = ["q.base_layer.weight", "q.lora_A.default.weight", "q.lora_B.default.weight", "norm.weight"]
CONFIG: dict[str, Any] = {"lora_alpha": 8}


def test_files_have_peft_s_names_or_those_of_the_model_without_adapters() -> None:
    assert stored_names(NAMES, merge=False) == {
        "q.lora_A.default.weight": "base_model.model.q.lora_A.weight",
        "q.lora_B.default.weight": "base_model.model.q.lora_B.weight",
    }
    assert stored_names(NAMES, merge=True) == {"q.base_layer.weight": "q.weight", "norm.weight": "norm.weight"}


@pytest.mark.parametrize(("more", "scale"), [({}, 4.0), ({"use_rslora": True}, 8 / 2**0.5)])
def test_a_weight_gets_the_product_of_its_adapter(more: dict[str, Any], scale: float) -> None:
    weight, down, up = torch.randn(3, 5), torch.randn(2, 5), torch.randn(3, 2)
    held = {"q.lora_A.default.weight": down, "q.lora_B.default.weight": up}
    torch.testing.assert_close(merged(NAMES[0], weight, held.get, CONFIG | more), weight + scale * up @ down)
    assert merged("norm.weight", weight, held.get, CONFIG) is weight
    assert merged(NAMES[0], weight, lambda _: None, CONFIG) is weight


def test_an_embedding_s_adapter_is_the_other_way_round() -> None:
    weight, down, up = torch.randn(5, 3), torch.randn(2, 5), torch.randn(3, 2)
    held: dict[str, Tensor] = {"e.lora_embedding_A.default": down, "e.lora_embedding_B.default": up}
    torch.testing.assert_close(merged("e.base_layer.weight", weight, held.get, CONFIG), weight + 4 * (up @ down).T)


def test_what_is_not_merged_here_says_who_does() -> None:
    held = {"q.lora_A.default.weight": torch.ones(2, 5), "q.lora_B.default.weight": torch.ones(3, 2)}
    with pytest.raises(UsageError, match=r"the adapter of q has use_dora.*merge_and_unload"):
        merged(NAMES[0], torch.ones(3, 5), held.get, CONFIG | {"use_dora": True})
