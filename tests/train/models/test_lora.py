"""Adapters for the training command: what is said about wrong settings."""

from __future__ import annotations

from torch import nn

from penstock.train.config.read import load_config
from penstock.train.models.lora import unmatched_target


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
