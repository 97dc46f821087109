"""Models of transformers and peft are recognised by what they have, without importing these libraries."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from penstock.model.transformers_models import default_inputs, origin_of


class Cached(nn.Module):
    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        return x


class PassesOn(nn.Module):
    """As models of transformers that take `use_cache` among their further keyword arguments."""

    def __init__(self, caches: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=False, get_text_config=lambda: SimpleNamespace(use_cache=caches))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x


PassesOn.__module__ = "transformers.models.invented"


def test_a_model_that_would_keep_a_cache_is_told_not_to_unless_the_user_says_something() -> None:
    assert default_inputs(Cached(), {}) == {"use_cache": False}
    assert default_inputs(Cached(), {"use_cache": True}) == {}
    assert default_inputs(PassesOn(caches=True), {}) == {"use_cache": False}
    assert default_inputs(PassesOn(caches=False), {}) == {}
    assert default_inputs(nn.Linear(2, 2), {}) == {}


def test_where_a_model_comes_from_is_what_its_configurations_say() -> None:
    model: Any = nn.Linear(2, 2)
    assert origin_of(model) is None
    document = {"model_type": "invented", "hidden_size": 2}
    model.config = SimpleNamespace(model_type="invented", to_json_string=lambda: json.dumps(document))
    model.name_or_path = "folder/of/weights"
    model.peft_config = {"default": SimpleNamespace(to_dict=lambda: {"r": 8, "target_modules": {"b", "a"}})}
    assert origin_of(model) == {
        "library": "transformers",
        "config": document | {"architectures": ["Linear"]},
        "folder": "folder/of/weights",
        "adapter": {"r": 8, "target_modules": ["a", "b"], "inference_mode": True},
    }
