"""A model's folder, or an adapter, of somebody else: transformers and peft take what is in it as it comes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.tools.train.build import build_model
from penstock.tools.train.config.read import load_config


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a tiny model, and an adapter for it, as transformers and peft do."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
    model.save_pretrained(root / "model")
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(root / "adapter")
    return root / "model", root / "adapter"


def built(model: Path, adapter: Path | None = None) -> Any:
    """Build the model of a folder, with an adapter, as training would."""
    settings = [f"model.source=huggingface:{model}", *([] if adapter is None else [f"lora.adapter={adapter}"])]
    return build_model(load_config(None, settings))[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "change",
    [
        {"r": 10**30},
        {"r": -1},
        {"r": "x"},
        {"r": [2]},
        {"target_modules": [1]},
        {"exclude_modules": "(.|.)*!"},
        {"rank_pattern": {"(.|.)*!": 4}},
        {"rank_pattern": {"([": 4}},
        {"rank_pattern": [1]},
        {"alpha_pattern": {"(.|.)*!": 4}},
        {"layers_pattern": "(.|.)*!", "layers_to_transform": [0]},
        {"layer_replication": [[0, 10**9]]},
        {"lora_alpha": "x"},
        {"lora_dropout": "x"},
        {"megatron_config": {"a": 1}, "megatron_core": "canary"},
        {"peft_type": "nothing"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_adapter_of_nonsense_is_refused(change: dict[str, Any], adapter: tuple[Path, Path], tmp_path: Path) -> None:
    """Patterns that never end, a billion layers, and numbers that are none: peft takes them as they come."""
    model, folder = adapter[0], shutil.copytree(adapter[1], tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UsageError, match=rf"lora.adapter: {folder}"):
        built(model, folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers = 10{9}; at most"),
        ({"num_labels": 10**9}, "has num_labels = 10{9}; at most"),
        ({"text_config": {"n_layer": 10**5}}, "has n_layer = 10{5}; at most"),
        ({"vocab_size": 10**30}, "cannot be|no language model"),
        ({"vocab_size": 10**14}, "no language model that can be built: .*memory"),
        ({"hidden_size": -4}, "no language model that can be built"),
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"hidden_act": "nothing"}, "no language model that can be built"),
        ({"dtype": "nothing"}, "cannot be read"),
        ({"model_type": "nothing"}, "cannot be read"),
        ({"rope_parameters": [1]}, "cannot be read"),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_model_s_folder_of_nonsense_is_refused(
    change: dict[str, Any], words: str, adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    """Layers are built one by one, with or without memory, and a billion of them take days."""
    folder = shutil.copytree(adapter[0], tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UsageError, match=f"model.source: .*{folder}.*({words})"):
        built(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("targets", ["(.|.)*!", r".*\.(q|v)_proj", "(["])
def test_an_adapter_s_layers_are_those_that_its_tensors_name(
    targets: str, adapter: tuple[Path, Path], tmp_path: Path
) -> None:
    """A pattern of somebody else may take for ever, so none is tried on the names of layers."""
    model, folder = adapter[0], shutil.copytree(adapter[1], tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": targets}))
    names = [[name for name, _ in built(model, each).named_parameters()] for each in (folder, adapter[1])]
    assert names[0] == names[1]
