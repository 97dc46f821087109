"""What stands beside tensors in a folder for `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.files.pretrained_writing import (
    file_names,
    parts_of,
    write_configs,
    write_index,
    write_tokenizer,
)
from penstock.checkpoint.files.tensors import TensorEntry
from penstock.errors import UsageError


def test_tensors_are_divided_into_files_in_order() -> None:
    entries = [TensorEntry(str(number), torch.float32, (size,), (0,)) for number, size in enumerate((1, 2, 9, 1, 1))]
    assert [[entry.key for entry in part] for part in parts_of(entries, 12)] == [["0", "1"], ["2"], ["3", "4"]]
    assert [len(part) for part in parts_of(entries, None)] == [5]
    assert file_names(1) == ["model.safetensors"]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_configurations_say_the_type_that_was_written(tmp_path: Path) -> None:
    origin = {"config": {"dtype": "float32", "layers": 2}, "generation_config": {"top_k": 5}, "adapter": {"r": 4}}
    assert write_configs(tmp_path, origin, dtype=torch.bfloat16, adapter=False) == [
        "config.json",
        "generation_config.json",
    ]
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "bfloat16", "layers": 2}
    assert write_configs(tmp_path, origin, dtype=None, adapter=True) == ["adapter_config.json"]
    assert write_configs(tmp_path, None, dtype=None, adapter=False) == []
    write_index(tmp_path, {"a": "one"}, 7)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 7}, "weight_map": {"a": "one"}}


def test_a_tokenizer_comes_from_its_folder_its_file_or_the_model_s_folder(tmp_path: Path) -> None:
    for name in ("source", "one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "source" / "notes").write_text("")
    origin = {"folder": str(tmp_path / "source")}
    assert write_tokenizer(tmp_path / "one", tmp_path / "source", {}) == ["tokenizer.json"]
    assert write_tokenizer(tmp_path / "two", tmp_path / "source" / "tokenizer.json", {}) == ["tokenizer.json"]
    assert write_tokenizer(tmp_path / "three", None, origin) == ["tokenizer.json"]
    assert write_tokenizer(tmp_path / "three", None, None) == []
    with pytest.raises(UsageError, match="has none of the files of a tokenizer"):
        write_tokenizer(tmp_path / "one", tmp_path / "two" / "nowhere", {})
