"""Weights exported for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint.short_run import penstock_command
from safetensors.torch import load_file
from torch import nn

import penstock


def test_export_writes_the_weights_under_their_own_names(
    trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, weights = trained
    penstock_command("export", folder, tmp_path / "one.safetensors")
    found = load_file(tmp_path / "one.safetensors")
    assert set(found) == set(weights) - {"head.weight"}  # tied to the embedding
    assert all(torch.equal(found[name], weights[name]) for name in found)
    document = json.loads(
        penstock_command("export", folder, tmp_path / "many", "--file-size", "1kB", "--dtype", "bfloat16", "--json")
    )
    assert not document["huggingface"]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        kept = weights[name].to(torch.bfloat16) if weights[name].is_floating_point() else weights[name]
        assert torch.equal(load_file(tmp_path / "many" / file)[name], kept)
    assert "already exists" in penstock_command("export", folder, tmp_path / "many", code=2)
    assert "choose one of" in penstock_command("export", folder, tmp_path / "x", "--dtype", "int4", code=2)
    assert "such as 5GB" in penstock_command("export", folder, tmp_path / "x", "--file-size", "much", code=2)


@pytest.mark.slow
def test_a_model_of_transformers_is_exported_for_from_pretrained(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (4, 6))
    pipe = penstock.Pipeline(
        model, stages=2, microbatches=2, example={"input_ids": ids[:2], "labels": ids[:2]}, loss_fn=None
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(input_ids=ids, labels=ids)
    optimizer.step()
    penstock.save(tmp_path / "llama", pipe, optimizer)
    loss = pipe.evaluate(input_ids=ids, labels=ids).loss
    pipe.close()
    assert "from_pretrained" in penstock_command("export", tmp_path / "llama", tmp_path / "out")
    again, told = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    torch.testing.assert_close(again.eval()(input_ids=ids, labels=ids).loss, loss)
    assert again.config.to_dict()["hidden_size"] == 16


def test_an_export_of_a_plain_model_has_no_config(tmp_path: Path) -> None:
    pipe = penstock.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2, microbatches=1)
    penstock.save(tmp_path / "it", pipe)
    penstock_command("export", tmp_path / "it", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    pipe.close()
