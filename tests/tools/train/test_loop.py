"""Training itself, in this process with ranks as threads: what it learns, how it goes on, how it ends."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mostly_slow
from torch import Tensor, nn
from typer.testing import CliRunner

import penstock
from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli import app
from penstock.errors import CheckpointError, UsageError
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.evaluate import evaluate_checkpoint
from penstock.tools.train.generation.opening import open_writer
from penstock.tools.train.generation.sampling import Sampling
from penstock.tools.train.launch.stopping import INTERRUPTED, Stop
from penstock.tools.train.run.metrics import Metrics, read_metrics
from penstock.tools.train.run.progress import Pace, Progress, StepFigures, of_time
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.updates.nonfinite import NonFinite
from penstock.tools.train.updates.optimizer import rate_at
from penstock.tools.train.worker import Job, train_here

TINY = [
    "model.options.layers=2",
    "model.options.width=16",
    "model.options.heads=2",
    "data.sequence=16",
    "data.batch=8",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.workers=threads",
    "training.steps=8",
    "optimizer.warmup=2",
    "evaluation.every=4",
    "evaluation.batches=2",
    "checkpoint.every=3",
    "logging.every=4",
    "logging.tensorboard=off",
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return path


def config_of(folder: Path, text: Path, *changes: str) -> TrainConfig:
    config = load_config(None, [*TINY, f"data.source={text}", f"output={folder / 'run'}", *changes])
    check_consistent(config)
    return config


def trained(config: TrainConfig, resume: bool = False, stop: Stop | None = None) -> int:
    RunFolder(Path(config.output)).prepare(config, resume=resume, fresh=not resume).free()
    return train_here(Job(config, "penstock train mine.toml --resume"), stop or Stop())


def losses(config: TrainConfig) -> list[float]:
    lines = read_metrics(RunFolder(Path(config.output)).metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


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
def test_steps_that_are_done_again_are_in_the_metrics_once(tmp_path: Path, text: Path) -> None:
    """As after a kill: step 8 was trained and written down, and the newest checkpoint is of step 6."""
    config = config_of(tmp_path, text)
    assert trained(config) == 0
    wanted = losses(config)
    folder = RunFolder(Path(config.output))
    (folder.checkpoints / "step-00000008" / "manifest.json").unlink()
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "lo')
    assert trained(config, resume=True) == 0
    assert losses(config) == wanted


@pytest.mark.slow
def test_a_resumed_run_names_the_checkpoint_that_it_has_loaded(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named the newest one, though that was damaged and an older one was loaded."""
    config = config_of(tmp_path, text, "training.steps=4", "evaluation.every=0", "checkpoint.every=2")
    assert trained(config) == 0
    folder = RunFolder(Path(config.output))
    (folder.checkpoints / "step-00000004" / "index.json").write_text("{}")
    capsys.readouterr()
    assert trained(config, resume=True) == 0
    assert f"resuming from step 2: {folder.checkpoints / 'step-00000002'}\n" in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_go_on_with(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, text, "training.steps=2")
    assert trained(config) == 0
    assert trained(config, resume=True) == 0
    assert "step 2, nothing left to do" in capsys.readouterr().out
    assert len(losses(config)) == 2


@pytest.mark.slow
def test_another_layout_goes_on_where_this_one_was(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "model.options.layers=4", "training.steps=6", "evaluation.every=0")
    assert trained(config) == 0
    wanted = losses(config)
    other = config_of(
        tmp_path,
        text,
        "model.options.layers=4",
        "training.steps=6",
        "evaluation.every=0",
        f"output={tmp_path / 'other'}",
        "pipeline.ranks=1",
        "pipeline.stages=1",
        "checkpoint.every=3",
    )
    RunFolder(Path(other.output)).prepare(other, resume=False, fresh=True).free()
    source = RunFolder(Path(config.output)).checkpoints / "step-00000003"
    source.rename(RunFolder(Path(other.output)).checkpoints / source.name)
    assert trained(other, resume=True) == 0
    again = [line["loss"] for line in read_metrics(RunFolder(Path(other.output)).metrics)]
    assert again == pytest.approx(wanted[3:], rel=1e-4)


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


class Poisoned(nn.Module):
    """Gives NaN from one of its calls on."""

    def __init__(self, after: int, where: str = "forward", only: int = 10**9) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.after, self.where, self.only, self.calls = after, where, only, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        bad = self.training and self.after <= self.calls < self.after + self.only
        self.calls += self.training
        if bad and self.where == "forward":
            return out * math.nan
        if bad and self.where == "backward":
            out = out + torch.sqrt(out.detach() * 0 + (out - out)).sum() * 0.0  # 0 * inf in its gradient
        return out


def poisoned(after: int = 8, where: str = "forward", only: int = 10**9) -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8), Poisoned(after, where, only), nn.Linear(8, 8)]
    return nn.Sequential(*layers), nn.functional.mse_loss


class Numbers:
    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(8, 8, generator=generator), torch.zeros(8, 8)

    def validation(self, number: int) -> tuple[Tensor, Tensor]:
        return self.batch(1000 + number)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "my_run", sys.modules[__name__])
    return ["model.source=my_run:poisoned", "data.source=my_run:Numbers", "model.options={}"]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("forward", r"step 3: the loss is nan. First bad: stage 1: 2 \(Poisoned\), whose output has NaN"),
        ("backward", r"step 3: the loss is .*, the norm of the gradients nan.*stage 1: the backward of 2.inner"),
    ],
)
def test_a_bad_number_stops_the_run_and_the_module_is_named(
    tmp_path: Path, text: Path, mine: list[str], where: str, words: str
) -> None:
    config = config_of(tmp_path, text, *mine, f"model.options={{after=8, where='{where}'}}", "checkpoint.every=2")
    with pytest.raises(NonFinite, match=words):
        trained(config)
    folder = RunFolder(Path(config.output))
    assert find_checkpoint(folder.root).name == "step-00000002"
    assert len(read_metrics(folder.metrics)) == 2


def bad_from_the_start() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].bias[3] = math.nan
    return model, nn.functional.mse_loss


def test_weights_that_begin_bad_are_named_and_no_setting_is_advised(
    tmp_path: Path, text: Path, mine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower rate was advised where the folder's own weights held NaN."""
    config = config_of(tmp_path, text, *mine, "model.source=my_run:bad_from_the_start")
    words = (
        r"stage 1: the parameter 1.bias was already NaN before the step\. The model begins with it: .*from_the_start$"
    )
    with pytest.raises(NonFinite, match=words):
        trained(config)
    monkeypatch.setattr("penstock.tools.train.steps.is_pretrained", lambda _: True)
    with pytest.raises(NonFinite, match=r"The weights in .* hold it, before any training; write that folder again"):
        trained(config)


def test_a_bad_step_is_left_out_by_option_and_too_many_end_the_run(tmp_path: Path, text: Path, mine: list[str]) -> None:
    once = [*mine, "training.nonfinite=skip", "model.options={after=8, only=4}"]
    config = config_of(tmp_path, text, *once)
    assert trained(config) == 0
    lines = read_metrics(RunFolder(Path(config.output)).metrics)
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert lines[2]["loss"] == "nan"
    assert all(math.isfinite(line["loss"]) for line in lines[3:])
    always = config_of(tmp_path, text, *mine, "training.nonfinite=skip", "training.most_skips=2")
    with pytest.raises(NonFinite, match="in 3 steps in a row"):
        trained(always)


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


# -- the folder of a run


def test_another_run_is_not_written_over(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "training.steps=1")
    folder = RunFolder(Path(config.output))
    with pytest.raises(UsageError, match="has no run to go on from"):
        folder.prepare(config, resume=True, fresh=False)
    assert trained(config) == 0
    note = folder.root / "my notes.txt"
    note.write_text("mine")
    with pytest.raises(UsageError, match="has a run already; add --resume"):
        folder.prepare(config, resume=False, fresh=False)
    lock = folder.prepare(config, resume=False, fresh=True)
    with pytest.raises(CheckpointError, match="is being written to by"):  # the run that holds it is not cleared away
        folder.prepare(config, resume=False, fresh=True)
    lock.free()
    assert note.exists()
    assert not folder.metrics.exists()
    assert not list(folder.checkpoints.iterdir())
    with pytest.raises(UsageError, match="which is a file"):
        RunFolder(note).prepare(config, resume=False, fresh=False)


# -- evaluation and text


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_and_continued(tmp_path: Path, text: Path) -> None:
    config = config_of(
        tmp_path, text, "training.steps=80", "optimizer.lr=0.02", "data.sequence=12", "checkpoint.every=0"
    )
    assert trained(config) == 0
    folder = RunFolder(Path(config.output))
    path = find_checkpoint(folder.root)
    assert path == find_checkpoint(folder.checkpoints) == find_checkpoint(path)
    step, losses, mean = evaluate_checkpoint(config, path, 2)
    assert (step, len(losses)) == (80, 2)
    assert mean == read_metrics(folder.metrics)[-1]["validation"] == pytest.approx(sum(losses) / 2)
    settings = [*TINY, f"data.source={text}", "data.sequence=12", "pipeline.ranks=1"]
    wide = load_config(None, settings)
    assert evaluate_checkpoint(wide, path, 2)[1] == pytest.approx(losses, rel=1e-5)  # another layout
    options = ["--checkpoint", str(path), "--batches", "2", "--json"]
    facts = json.loads(CliRunner().invoke(app, ["eval", *settings, *options]).stdout)
    assert facts["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert facts["bits_per_token"] == pytest.approx(facts["loss"] / math.log(2))
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss"]))

    writer, sampling = open_writer(path), Sampling(temperature=0.7, top_k=5, seed=1)

    def written(how: Sampling) -> bytes:
        return bytes(token for _, token in writer.continue_rows([list(b"the ")], 40, how))

    assert len(written(sampling)) == 40
    assert set(written(sampling)) <= set(b"the quick brown fox jumps over the lazy dog; \n")  # it knows its letters
    assert written(sampling) == written(sampling)
    assert written(sampling) != written(replace(sampling, seed=2))
    several = ["generate", str(path), "--prompt", "the ", "--prompt", "dog", "--greedy", "--tokens", "9", "--json"]
    assert [len(each["text"]) for each in json.loads(CliRunner().invoke(app, several).stdout)] == [9, 9]


def test_what_cannot_be_sampled_or_evaluated_is_refused(tmp_path: Path, text: Path, mine: list[str]) -> None:
    config = config_of(tmp_path, text, *mine, "training.steps=1", "model.options={after=99}")
    assert trained(config) == 0
    path = find_checkpoint(config.output)
    with pytest.raises(UsageError, match="is of my_run:poisoned; text can be sampled from the built-in GPT"):
        open_writer(path)
    with pytest.raises(UsageError, match="there is no"):
        find_checkpoint(tmp_path / "nowhere")
    plain = penstock.Pipeline(nn.Sequential(nn.Linear(2, 2)), stages=1, microbatches=1, loss_fn=nn.functional.mse_loss)
    with penstock.Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, plain)
    with pytest.raises(UsageError, match="not saved by penstock train"):
        open_writer(find_checkpoint(tmp_path / "own"))
    bare = config_of(tmp_path, text, "data.validation=0", "training.steps=1", f"output={tmp_path / 'bare'}")
    assert trained(bare) == 0
    with pytest.raises(UsageError, match="no validation data"):
        evaluate_checkpoint(bare, find_checkpoint(bare.output), 2)


def test_a_dry_run_of_somebody_elses_configuration_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "model.source=theirs:build", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "model.source = 'theirs:build'" in result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("option", [[], ["model.options.trust_remote_code=true"]])
def test_nor_does_it_run_the_code_of_a_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}')
    (folder / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "model.source=huggingface:theirs", "--dry-run", *option])
    assert result.exit_code == 2
    assert "code from a model's folder is not run" in result.output
    assert not (tmp_path / "ran").exists()


def open_model(config: TrainConfig) -> nn.Module:
    from penstock.tools.train.build import build_model

    return build_model(config)[0]


# -- small parts


def test_the_rate_rises_and_falls() -> None:
    config = load_config(None, ["training.steps=11", "optimizer.warmup=2", "optimizer.final=0.1"])
    shares = [rate_at(config, step) for step in range(11)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[-1] == pytest.approx(0.1)
    assert all(after <= before for before, after in pairwise(shares[1:]))
    fall = ["optimizer.decay=linear", "optimizer.final=0"]
    linear = load_config(None, ["training.steps=3", "optimizer.warmup=0", *fall])
    assert [rate_at(linear, step) for step in range(3)] == [1.0, 0.5, 0.0]
    flat = load_config(None, ["optimizer.warmup=0", "optimizer.decay=constant"])
    assert rate_at(flat, 150) == 1.0


def test_metrics_are_json_lines_without_nan(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", 0)
    metrics.write(1, loss=math.nan, norm=math.inf, extra=None)
    metrics.write(2, loss=0.1)
    metrics.close()
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": "nan", "norm": "inf"}, {"step": 2, "loss": 0.1}]
    Metrics(tmp_path / "m.jsonl", 1).close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1]
    Metrics(tmp_path / "m.jsonl", 0).close()
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reading = StepFigures(2, 30, 1.5, 1e-3, 0.25, 1234.5, 5_000_000, 0.25, 65.0)
    progress = Progress(sys.stdout, 2)
    for step in range(1, 5):
        progress.show(StepFigures(**{**reading.__dict__, "step": step}))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["2/30", "4/30"]
    assert lines[0] == (
        "step  2/30  loss 1.5000  lr 1.00e-03  norm 0.25  1,234 tokens/s  memory 5 MB  idle 25 %  eta 1:05"
    )
    Progress(None, 1).show(reading)
    assert capsys.readouterr().out == ""


def test_time_is_said_as_people_do() -> None:
    assert [of_time(s) for s in (5, 65, 3661, 90061, math.inf)] == ["0:05", "1:05", "1:01:01", "1 d 1:01:01", "-"]
    pace = Pace()
    pace.step(100)
    assert pace.rate > 0
    assert pace.left(0) == 0


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


def test_a_batch_is_shared_by_replicas_row_by_row() -> None:
    from penstock.tools.train.data.batch import DataBatch

    batch = DataBatch((torch.arange(8).reshape(4, 2),), {"mask": torch.ones(4), "scale": 2.0}, torch.arange(4), 8)
    halves = [batch.share(number, 2) for number in range(2)]
    assert [half.target.tolist() for half in halves] == [[0, 1], [2, 3]]
    assert [half.kwargs["mask"].shape[0] for half in halves] == [2, 2]
    assert [half.kwargs["scale"] for half in halves] == [2.0, 2.0]
    assert halves[0].tokens == 8
    assert batch.share(0, 1) is batch
