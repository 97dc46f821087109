"""`penstock checkpoint list | verify | export | diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint.short_run import penstock_command, saved_run
from train_runs import LAYOUTS, Run

import penstock
from penstock.cli.checkpoint import auto_class


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with checkpoints of a run, and the weights that the last of them has."""
    folder = tmp_path_factory.mktemp("run")
    return folder, saved_run(folder)


def test_list_shows_each_with_its_layout(trained: tuple[Path, object]) -> None:
    lines = penstock_command("list", trained[0]).splitlines()
    assert lines[0].split()[:2] == ["checkpoint", "step"]
    assert [line.split()[0] for line in lines[1:]] == ["step-00000001", "step-00000002"]
    assert "1f1b" in lines[1]
    assert lines[1].endswith("complete")
    document = json.loads(penstock_command("list", trained[0], "--json"))
    assert [each["step"] for each in document] == [1, 2]
    assert document[0]["layout"]["placement"] == [0, 1, 2]
    assert document[0]["config"] == {"lr": 0.1}


def test_the_folder_of_a_run_means_its_checkpoints(trained: tuple[Path, object], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(trained[0].absolute())
    assert penstock_command("list", tmp_path) == penstock_command("list", trained[0])
    assert "every checksum right" in penstock_command("verify", tmp_path)
    assert "same to the bit" in penstock_command("diff", tmp_path, trained[0])


def test_verify_names_the_damaged_file_and_exits_with_1(trained: tuple[Path, object], tmp_path: Path) -> None:
    assert penstock_command("verify", trained[0]).count("every checksum right") == 2
    run = Run(**LAYOUTS["one stage"])
    penstock.save(tmp_path / "it", run.pipe)
    file = tmp_path / "it" / "process-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert f"{file} is damaged: its CRC-32 is" in penstock_command("verify", tmp_path / "it", code=1)
    (answer,) = json.loads(penstock_command("verify", tmp_path / "it", "--json", code=1))
    assert not answer["whole"]
    assert "not complete" in penstock_command("export", tmp_path / "it", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "it" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in penstock_command("verify", tmp_path / "it", code=1)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert "there is no" in penstock_command("list", tmp_path / "no", code=2)
    assert "contains none" in penstock_command("verify", tmp_path, code=2)
    assert "Commands:" in penstock_command()


def test_the_class_that_loads_an_export_follows_its_configuration(tmp_path: Path) -> None:
    assert auto_class(tmp_path) == "AutoModel"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert auto_class(tmp_path) == "AutoModelForCausalLM"
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert auto_class(tmp_path) == "AutoModel"
