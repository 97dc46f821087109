"""`penstock checkpoint list | verify | export | diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from train_runs import LAYOUTS, Run
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from penstock.cli.checkpoint import _auto_class


def penstock_command(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("run")
    run = Run(**LAYOUTS["three stages"])
    with penstock.Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            run.step()
            checkpointer.save(step, run.pipe, run.optimizer, config={"lr": 0.1 * step})
    run.close()
    other = Run(seed=4, **LAYOUTS["one stage"])
    penstock.load(folder / "step-00000002", other.pipe, other.optimizer)
    penstock.save(folder / "elsewhere", other.pipe, other.optimizer, step=2, config={"lr": 0.2})
    other.close()
    return folder, {name: value.clone() for name, value in other.pipe.state_dict().items()}


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


def test_diff_goes_by_name_across_layouts(trained: tuple[Path, object]) -> None:
    folder = trained[0]
    assert "are the same to the bit" in penstock_command("diff", folder / "step-00000002", folder / "elsewhere")
    text = penstock_command("diff", folder / "step-00000001", folder / "step-00000002", code=1)
    assert "model.embed.weight: " in text
    assert "config.lr: 0.1 and 0.2" in text
    answer = json.loads(penstock_command("diff", folder / "step-00000001", folder, "--json", code=1))
    changes = {each["name"]: each for each in answer["changes"]}
    assert changes["optimizer.embed.weight.step"]["largest"] == 1.0
    assert changes["model.blocks.0.1.num_batches_tracked"]["largest"] == 4.0  # microbatches of one step
    assert answer["steps"] == [1, 2]


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


def test_the_class_that_loads_an_export_follows_its_configuration(tmp_path: Path) -> None:
    assert _auto_class(tmp_path) == "AutoModel"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert _auto_class(tmp_path) == "AutoModelForCausalLM"
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert _auto_class(tmp_path) == "AutoModel"
