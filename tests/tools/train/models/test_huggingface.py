"""Models of transformers in the training command: weights from a folder, adapters, and back to transformers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import warm_commands

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.checkpoint.export import export
from penstock.errors import UsageError
from penstock.tools.train.build import build_model, build_pipeline
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.evaluate import load_for
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here

BASE = [
    "data.sequence=16",
    "data.batch=8",
    "data.validation=0",
    "pipeline.microbatches=4",
    "training.steps=3",
    "optimizer.lr=0.01",
    "optimizer.decay=constant",
    "optimizer.warmup=0",
    "evaluation.every=0",
    "checkpoint.every=0",
    "logging.tensorboard=off",
]
IDS = torch.arange(24).view(2, 12) * 7 % 256


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with tied ends, saved in several files; a text beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "llama", max_shard_size="50KB")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    return folder


def settings(base: Path, output: Path, *changes: str) -> list[str]:
    source = [f"model.source=huggingface:{base / 'llama'}", f"data.source={base / 'text.txt'}", f"output={output}"]
    return [*BASE, *source, *changes]


def config_of(base: Path, output: Path, *changes: str) -> TrainConfig:
    config = load_config(None, settings(base, output, "pipeline.workers=threads", *changes))
    check_consistent(config)
    return config


def trained(config: TrainConfig) -> list[float]:
    RunFolder(Path(config.output)).prepare(config, resume=False, fresh=True).free()
    assert train_here(Job(config, "penstock train"), Stop()) == 0
    return losses(Path(config.output))


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(RunFolder(folder).metrics)]


def logits_of(config: TrainConfig) -> torch.Tensor:
    """What the pipeline of a run gives, from its newest checkpoint."""
    data = open_data(config)
    model, loss = build_model(config)
    with build_pipeline(config, model, loss, data.first(), ranks=config.pipeline.ranks, transport="threads") as pipe:
        load_for(config, find_checkpoint(config.output), pipe)
        found: torch.Tensor = pipe.predict(IDS, reduce=lambda output: output.logits)
        return found


def plain_losses(base: Path, config: TrainConfig, wrap: Any = None) -> list[float]:
    """The loop that anybody would write, with the whole model in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base / "llama").train()
    model = model if wrap is None else wrap(model)
    groups: dict[float, list[Any]] = {0.0: [], config.optimizer.weight_decay: []}
    for parameter in (each for each in model.parameters() if each.requires_grad):
        groups[0.0 if parameter.dim() < 2 else config.optimizer.weight_decay].append(parameter)
    options = [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    optimizer = torch.optim.AdamW(options, lr=config.optimizer.lr, betas=betas, eps=config.optimizer.eps)
    data, found = open_data(config), []
    for step in range(config.training.steps):
        batch = data.at(step)
        scores = model(*batch.args, **batch.kwargs).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch.target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_weights_of_a_folder_are_trained_as_a_plain_loop_trains_them_and_go_back(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (base / "llama" / "tokenizer.json").write_text("{}")
    config = config_of(base, tmp_path / "run", "pipeline.ranks=3")
    assert trained(config) == pytest.approx(plain_losses(base, config), rel=1e-5)
    done = export(find_checkpoint(config.output), tmp_path / "out", file_bytes=60_000)
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in done.files}
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits_of(config), rtol=1e-5, atol=1e-5)
    (base / "llama" / "tokenizer.json").unlink()


@pytest.mark.slow
def test_tensors_are_divided_over_processes_by_the_command(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    command = settings(base, run, "mesh.tp=2", "pipeline.ranks=2")
    result = subprocess.run(
        [warm_commands() / "penstock", "train", *command], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    config = config_of(base, run, "pipeline.ranks=2")
    assert losses(run) == pytest.approx(plain_losses(base, config), rel=1e-5)
    assert len(json.loads((run / "memory.json").read_text())) == 4
    export(find_checkpoint(run), tmp_path / "out")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
    torch.testing.assert_close(found, logits_of(config), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_adapters_train_on_two_processes_and_load_with_peft(base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    command = settings(base, run, "lora.rank=4", "pipeline.ranks=2")
    result = subprocess.run(
        [warm_commands() / "penstock", "train", *command], capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    config = config_of(base, run, "lora.rank=4", "pipeline.ranks=1")
    alone = config_of(base, tmp_path / "alone", "lora.rank=4", "pipeline.ranks=1")
    assert losses(run) == pytest.approx(trained(alone), rel=1e-5)
    saved = find_checkpoint(run)
    kept = [name for name in json.loads((saved / "index.json").read_text())["tensors"] if name.startswith("model.")]
    assert len(kept) == 12  # two factors for two layers of each of three blocks: the rest is in its folder
    assert all(".lora_" in name for name in kept)
    rows = json.loads((run / "memory.json").read_text())
    assert [row["gradients"] > 0 for row in rows] == [True, True]
    assert all(row["weights"] > 10 * row["gradients"] for row in rows)

    adapter, whole = export(saved, tmp_path / "adapter"), export(saved, tmp_path / "whole", merge=True)
    assert adapter.adapter
    assert whole.huggingface
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "llama"), tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        wanted = model(IDS).logits
        torch.testing.assert_close(logits_of(config), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    _started_from(base, tmp_path, wanted)
    _written(saved, merged)


def _started_from(base: Path, tmp_path: Path, wanted: torch.Tensor) -> None:
    """A pipeline that starts from the adapter has it, saves it as it is, and merges it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    config = config_of(base, tmp_path / "more", f"lora.adapter={tmp_path / 'adapter'}", "pipeline.ranks=2")
    data = open_data(config)
    model, loss = build_model(config)
    with build_pipeline(config, model, loss, data.first(), ranks=2, transport="threads") as pipe:
        got = pipe.predict(IDS, reduce=lambda output: output.logits)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        pipe.save_pretrained(tmp_path / "again")
        pipe.save_pretrained(tmp_path / "merged", merge_adapters=True)
    once, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert once.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in once.items())
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _written(saved: Path, merged: Any) -> None:
    """Rows of different lengths that are continued together are what each becomes alone, by transformers itself."""
    from penstock.tools.train.generation.continuing import Sampling
    from penstock.tools.train.generation.opening import open_writer

    writer = open_writer(saved)
    prompts = [list(b"the quick"), list(b"dog")]
    rows: dict[int, list[int]] = {0: [], 1: []}
    for row, token in writer.continue_rows(prompts, 8, Sampling(temperature=0)):
        rows[row].append(token)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        alone = merged.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert rows[row] == alone[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_what_a_folder_lacks_is_said_before_anything_runs(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": 256, "intermediate_size": 16}))
    config = load_config(None, [*BASE, f"model.source=huggingface:{folder}"])
    with pytest.raises(UsageError, match=r'neither model\.safetensors nor .*model\.init = "random"'):
        build_model(config)
    random, _ = build_model(load_config(None, [*BASE, f"model.source=huggingface:{folder}", "model.init=random"]))
    assert not any(parameter.is_meta for parameter in random.parameters())
    named = load_config(None, [*BASE, "model.source=huggingface:llama", "model.init=pretrained"])
    with pytest.raises(UsageError, match="is no folder with a config"):
        build_model(named)


LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
SIGHT = {"image_size": 28, "patch_size": 14}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "llama", **LLAMA, "attn_implementation": "evil/kernel"},
            "'evil/kernel' is not of transformers",
        ),
        ({"model_type": "llama", **LLAMA, "attn_implementation": "flash_attention_2"}, "needs the package flash_attn"),
        (
            {
                "model_type": "gemma3",
                "text_config": {**LLAMA, "head_dim": 8, "num_key_value_heads": 1},
                "vision_config": {**LLAMA, **SIGHT},
                "attn_implementation": {"text_config": "kernels-community/evil"},
            },
            "'kernels-community/evil' is not of transformers",
        ),
    ],
    ids=["model", "fallback", "model inside of a model"],
)
def test_no_kernel_of_a_repository_is_run(
    config: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels package, transformers downloads and runs the code of the attention that a config.json names."""
    kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    asked: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr(kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(kernels, "get_kernel_hub", lambda name, **options: asked.append(name), raising=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=words):
        build_model(load_config(None, [*BASE, f"model.source=huggingface:{tmp_path}", "model.init=random"]))
    assert asked == []


def test_keys_of_adapters_and_tensors_are_checked_together() -> None:
    for changes, words in (
        (["mesh.tp=2", "pipeline.workers=threads"], "mesh.tp are processes"),
        (["mesh.tensor_plan=gpt"], "mesh.tp is 1"),
        (["lora.alpha=4"], "set lora.rank"),
    ):
        with pytest.raises(UsageError, match=words):
            check_consistent(load_config(None, changes))
