"""Adapters for the training command: what is said about wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.checkpoint.files.adapters import is_adapter, name_in_adapter_file
from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.models.lora import adapter_values, add_adapters, unmatched_target


def test_a_target_that_no_layer_has_is_answered_with_near_names() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(2, 2), "v_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    words = unmatched_target(load_config(None, ["lora.rank=2", 'lora.targets=["v_proj", "q_prj"]']), model)
    assert words == "'q_prj' is the name of no layer of the model; its linear layers are q_proj, v_proj"
    assert not unmatched_target(load_config(None, ["lora.rank=2", 'lora.targets=["v_proj"]']), model)
    words = unmatched_target(load_config(None, ["lora.rank=2"]), model)  # asked where peft has refused
    assert words.endswith('name some, of "q_proj", "v_proj", or ["all-linear"]')


def test_a_target_unlike_all_names_is_answered_with_all_of_them() -> None:
    """One name that shared two letters with the target used to be the whole answer; GPT-2's Conv1D layers had none."""
    from transformers.pytorch_utils import Conv1D

    names = [f"{first}_proj" for first in "kqvogud"]
    model = nn.ModuleDict(
        {**{name: nn.Linear(2, 2) for name in names}, "c_attn": Conv1D(2, 2), "norm": nn.LayerNorm(2)}
    )
    words = unmatched_target(load_config(None, ["lora.rank=2", 'lora.targets=["zork"]']), model)
    assert sorted(words.partition("layers are ")[2].split(", ")) == sorted(["c_attn", *names])


def test_an_adapter_with_more_layers_than_the_model_is_refused(tmp_path: Path) -> None:
    """Its other tensors would have gone unread without a word."""
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import save_file

    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.ModuleDict({"q_proj": nn.Linear(4, 4)}) for _ in range(count)))

    settings = LoraConfig(r=2, target_modules=["q_proj"])
    larger = inject_adapter_in_model(settings, layers(3))
    stored = {name_in_adapter_file(name): value for name, value in larger.named_parameters() if is_adapter(name)}
    settings.save_pretrained(str(tmp_path))
    save_file(stored, tmp_path / "adapter_model.safetensors")
    config = load_config(None, [f"lora.adapter={tmp_path}"])
    add_adapters(config, layers(3))
    with pytest.raises(UsageError, match=r"2 of them, such as base_model.model.2.q_proj.lora_A.weight\); this adapter"):
        add_adapters(config, layers(2))


def test_an_adapter_of_another_model_is_called_that(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 8)}, tmp_path / "adapter_model.safetensors")
    fill = adapter_values(load_config(None, [f"lora.adapter={tmp_path}"]))
    fill("q_proj.lora_A.default.weight", torch.ones(2, 8))
    with pytest.raises(
        UsageError, match=r"\(2, 8\), and \(2, 16\) in the model; this adapter was made for another model"
    ):
        fill("q_proj.lora_A.default.weight", torch.ones(2, 16))
    with pytest.raises(UsageError, match=r"no tensor .*v_proj.* this adapter was made for another model"):
        fill("v_proj.lora_A.default.weight", torch.ones(2, 8))
