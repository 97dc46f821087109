"""Folders whose tensors transformers converts while it loads them are read as it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

import penstock
from penstock.checkpoint.files.pretrained import PretrainedFolder
from penstock.errors import UsageError

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MIXTURES = {
    "mixtral": MixtralConfig(num_local_experts=11, **SHAPE),  # more than ten: their order is that of numbers
    "qwen2_moe": Qwen2MoeConfig(
        num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=8, decoder_sparse_step=1, **SHAPE
    ),
}


def saved(name: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MIXTURES[name])
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_a_mixture_are_put_together(name: str, tmp_path: Path) -> None:
    whole = saved(name, tmp_path / "it")
    with safe_open(tmp_path / "it" / "model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    experts = [each for each in whole.state_dict() if "experts" in each and each not in stored]
    assert experts  # this is about something
    folder = PretrainedFolder(tmp_path / "it")
    with penstock.lazy():
        model = AutoModelForCausalLM.from_config(MIXTURES[name])
    folder.fit(model)
    for key, value in whole.state_dict().items():
        found = torch.empty_like(value)
        folder(key, found)
        assert torch.equal(found, value), key


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    with penstock.lazy():
        model = AutoModelForCausalLM.from_config(MIXTURES["mixtral"])
    tensors = load_file(path)
    one = next(name for name in tensors if ".experts.10." in name and "w2" in name)
    save_file({name: value for name, value in tensors.items() if name != one}, path)
    with pytest.raises(UsageError, match=r"of another shape \S*experts\.down_proj \(10, 16, 24\), not \(11, 16, 24\)"):
        PretrainedFolder(tmp_path).fit(model)
    save_file({**tensors, "model.stray": torch.zeros(1)}, path)
    with pytest.raises(UsageError, match=r"unknown model\.stray"):
        PretrainedFolder(tmp_path).fit(model)


def test_a_mixture_goes_through_a_pipeline_and_back_to_transformers(tmp_path: Path) -> None:
    whole, ids = saved("mixtral", tmp_path / "it"), torch.arange(12).view(2, 6)
    with penstock.lazy():
        model = AutoModelForCausalLM.from_config(MIXTURES["mixtral"])
    model.config.use_cache = False
    folder = PretrainedFolder(tmp_path / "it")
    folder.fit(model)
    with penstock.Pipeline(model, stages=2, microbatches=1, example={"input_ids": ids}, init=folder) as pipe:
        pipe.save_pretrained(tmp_path / "out")
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    found = again.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())
