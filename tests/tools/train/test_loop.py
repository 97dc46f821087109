"""Training itself, in this process with ranks as threads: what it learns, how it goes on, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import mostly_slow
from tiny_runs import config_of, losses, trained
from torch import nn

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.stopping import INTERRUPTED, Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder


def test_it_learns_and_says_where_things_are(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, text, "training.steps=60", "optimizer.lr=0.01", "checkpoint.every=20")
    assert trained(config) == 0
    found = losses(config)
    assert found[0] > 5  # of 256 bytes, all alike: ln 256 = 5.5
    assert sum(found[-5:]) / 5 < 3
    folder = RunFolder(Path(config.output))
    said = capsys.readouterr().out
    for place in (folder.checkpoints / "step-00000060", folder.metrics, folder.page):
        assert str(place) in said
        assert place.exists()
    assert "penstock generate" in said
    line = read_metrics(folder.metrics)[-1]
    assert {"loss", "lr", "norm", "tokens_per_second", "memory", "idle", "validation"} <= set(line)
    assert "measured" in folder.page.read_text(encoding="utf-8")
    kept = {path.name for path in folder.checkpoints.glob("step-*")}
    assert kept == {f"step-{n:08}" for n in (20, 40, 60)} | {find_checkpoint(folder.root / "best").name}


@pytest.mark.slow
def test_packed_rows_that_are_streamed_go_on_at_the_exact_row(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lengths = [(number * 7) % 15 + 2 for number in range(60)]
    rows.write_text("".join(json.dumps({"input_ids": [length] * length}) + "\n" for length in lengths))
    change = ["data.packing=true", "data.streaming=true", "data.window=9", f"data.validation_source={rows}"]
    change += ["training.accumulate=2", "evaluation.every=2"]
    whole, parts = (config_of(tmp_path, rows, *change, f"output={tmp_path / name}") for name in ("whole", "parts"))
    assert trained(whole) == 0
    stop = Stop()
    stop.asked = True
    assert trained(parts, stop=stop) == INTERRUPTED
    assert trained(parts, resume=True) == 0
    assert losses(parts) == losses(whole)
    assert len(set(losses(whole))) == 8


@pytest.mark.parametrize(
    "change",
    mostly_slow([[], ["model.options.dropout=0.2", "training.accumulate=2", "pipeline.schedule=zb-v"]], []),
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, text: Path, change: list[str]) -> None:
    whole = config_of(tmp_path, text, f"output={tmp_path / 'whole'}", "evaluation.every=2", *change)
    parts = config_of(tmp_path, text, f"output={tmp_path / 'parts'}", "evaluation.every=2", *change)
    assert trained(whole) == 0
    stop = Stop()
    stop.asked = True
    assert trained(parts, stop=stop) == INTERRUPTED
    assert losses(parts) == losses(whole)[:1]
    assert trained(parts, resume=True) == 0
    assert losses(parts) == losses(whole)
    validation = [
        [line.get("validation") for line in read_metrics(RunFolder(Path(c.output)).metrics)] for c in (whole, parts)
    ]
    assert validation[0][1:] == validation[1][1:]  # a step that is the last before a stop is not evaluated


@pytest.mark.slow
def test_accumulated_passes_are_one_step_of_the_whole_batch(tmp_path: Path, text: Path) -> None:
    """Two passes of 4 rows have the mean loss's own gradient: what one optimizer step does is that of plain code."""
    config = config_of(
        tmp_path, text, "training.accumulate=2", "training.steps=1", "optimizer.name=sgd", "optimizer.clip=9"
    )
    assert trained(config) == 0
    line = read_metrics(RunFolder(Path(config.output)).metrics)[0]
    from penstock.tools.train.build import build_model
    from penstock.tools.train.data.batches import open_data

    data = open_data(config)
    model, _ = build_model(config)
    values = []
    for number in range(2):
        batch = data.at(number)
        value = nn.functional.cross_entropy(model(*batch.args).flatten(0, 1), batch.target.flatten())
        (value / 2).backward()
        values.append(value.item())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert line["loss"] == pytest.approx(sum(values) / 2, rel=1e-5)
    assert line["norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert line["validation"] == pytest.approx(sum(values) / 2, rel=0.2)  # near it, and not half of it


@pytest.mark.slow
def test_a_models_own_loss_and_a_hugging_face_configuration_train(tmp_path: Path, text: Path) -> None:
    shape = "{hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=256}"
    config = config_of(
        tmp_path,
        text,
        "model.source=huggingface:llama",
        f"model.options={shape}",
        "training.steps=3",
        "optimizer.lr=0.01",
    )
    assert trained(config) == 0
    assert losses(config)[0] > 5
    with pytest.raises(UsageError, match=r'no folder "lama".*near: .*llama'):
        trained(config_of(tmp_path, text, "model.source=huggingface:lama", "model.options={}"))


def test_a_measured_cut_is_kept_for_when_the_run_goes_on(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "pipeline.balance=time", "training.steps=2")
    assert trained(config) == 0
    kept = json.loads((Path(config.output) / "cut.json").read_text())
    assert kept["stages"] == 2
    (Path(config.output) / "cut.json").write_text(json.dumps({"stages": 2, "counts": [1, 3]}))
    assert trained(load_config(Path(config.output) / "config.json", ["training.steps=3"]), resume=True) == 0
    assert json.loads((Path(config.output) / "cut.json").read_text())["counts"] == [1, 3]


@pytest.mark.slow
def test_fp16_finds_its_scale_and_keeps_it_when_the_run_goes_on(tmp_path: Path, text: Path) -> None:
    half = ["pipeline.precision=fp16", "evaluation.every=0"]
    whole = config_of(tmp_path, text, *half, f"output={tmp_path / 'whole'}")
    parts = config_of(tmp_path, text, *half, f"output={tmp_path / 'parts'}")
    assert trained(whole) == 0
    stop = Stop()
    stop.asked = True
    assert trained(parts, stop=stop) == INTERRUPTED
    assert trained(parts, resume=True) == 0
    assert losses(parts) == losses(whole)
    plain = config_of(tmp_path, text, "evaluation.every=0", f"output={tmp_path / 'plain'}")
    assert trained(plain) == 0
    assert losses(plain) != losses(whole)
    assert losses(plain) == pytest.approx(losses(whole), rel=1e-2)
