"""A folder that somebody hands over runs nothing, whatever is in it and whichever command looks at it.

`penstock plan --check RUN` and `plan --from RUN` imported and called whatever `RUN/config.json` named, and
`train --dry-run` called the function of `data.validation_source`: neither asked for --trust.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from command import run
from tiers import mostly_exhaustive, mostly_slow

import penstock
from penstock.checkpoint.disk.manifest import seal
from penstock.cli import app
from penstock.errors import FileError
from penstock.planner.writing import to_toml
from penstock.schedule import build
from penstock.tools.train.config.read import load_config, read_config, to_document
from penstock.tools.train.config.source import CODE_KEYS
from penstock.tools.train.run.run_folder import RunFolder

# Whatever is imported of it, called with whatever, leaves a mark.
CANARY = """
from pathlib import Path
MARK = Path(__file__).with_name("mark")
MARK.write_text("imported")
def run(*args, **kwargs):
    MARK.write_text("called")
"""
TINY = ["model.options.layers=2", "model.options.width=16", "model.options.heads=2", "data.sequence=16", "data.batch=8"]
TINY += ["pipeline.ranks=2", "pipeline.microbatches=2", "training.steps=2", "logging.tensorboard=off"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "canary.py").write_text(CANARY)
    (tmp_path / "cluster.toml").write_text("hosts = 1\ndevices = 2\n[device]\nmemory = 1e9\npeak = 1e12\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("canary", None)
    assert not (tmp_path / "mark").exists(), "somebody else's code ran"


def planted(key: str) -> dict[str, Any]:
    """Return the configuration of a run with the canary in one key."""
    document = to_document(load_config(None, [*TINY, "data.source=cluster.toml", "output=out"]))
    table, _, name = key.rpartition(".")
    document[table][name] = "canary:run"
    if key == "data.validation_source":
        document["data"]["source"], document["data"]["format"] = "rows.jsonl", "text"
        Path("rows.jsonl").write_text('{"text": "some words to learn"}\n' * 20)
    return document


def write_run(root: Path, document: dict[str, Any]) -> Path:
    """Write a folder as a run leaves it, without checkpoints."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(document))
    (root / "metrics.jsonl").write_text(6 * (json.dumps({"step": 1, "seconds": 0.05}) + "\n"))
    kinds = {"weights": 1e5, "gradients": 1e5, "optimizer": 2e5, "activations": 3e5, "tensors": 6e5, "process": 3e8}
    (root / "memory.json").write_text(json.dumps([kinds, kinds]))
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny run of two steps, with a recorded timeline and a checkpoint."""
    root = tmp_path_factory.mktemp("trained") / "run"
    text = root.parent / "text.txt"
    text.write_text("some words to learn, " * 200)
    settings = [*TINY, "training.steps=6", f"data.source={text}", f"output={root}", "pipeline.workers=threads"]
    result = run("train", *settings, "logging.every=2", "evaluation.every=0")
    assert result.exit_code == 0, result.output
    return root


def replant(run: Path, document: dict[str, Any]) -> None:
    """Put another configuration into the checkpoints of a run, sealed as if it had been there from the start."""
    for path in (run / "checkpoints").glob("step-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        body = {name: value for name, value in manifest.items() if name not in ("format", "version", "checksum")}
        (path / "manifest.json").write_bytes(seal({**body, "config": document}))


LOOKING = [
    ["plan", "--check", "run"],
    ["plan", "--check", "run", "--cluster", "cluster.toml"],
    ["plan", "--from", "run"],
    ["plan", "--from", "run", "--cluster", "cluster.toml"],
    ["plan", "run/config.json", "--cluster", "cluster.toml"],
    ["plan", "run/config.json", "--here"],
    ["plan", "some.toml", "--here"],
    ["plan", "some.toml", "--from", "run"],
    ["plan", "gpt", "--from", "run", "--cluster", "cluster.toml"],
    ["train", "--dry-run", "run/config.json"],
    ["train", "--dry-run", "some.toml"],
    ["train", "run/config.json"],
    ["train", "run/config.json", "--resume"],
    ["eval", "run/config.json"],
    ["eval", "run/config.json", "--checkpoint", "run"],
    ["generate", "run"],
    ["checkpoint", "list", "run"],
    ["checkpoint", "verify", "run"],
    ["checkpoint", "export", "run", "exported"],
    ["checkpoint", "diff", "run", "run"],
    ["view", "run"],
    ["whatif", "--from", "run"],
]
SCHEDULES = [  # of a schedule's file, or of a recorded run
    [name, source]
    for name in ("show", "verify", "simulate", "rehearse", "compare", "view", "studio --out page.html")
    for source in ("planted.json", "planted.csv", "trace.json")
]
NO_FILES = {"primer", "bench", "search", "doctor"}  # programs of our own, by name; and sizes


COMMANDS = [*LOOKING, *SCHEDULES]


def test_every_command_is_tried() -> None:
    group = typer.main.get_command(app)
    names = {
        (name, inner) if inner else (name,)
        for name, command in group.commands.items()
        for inner in (getattr(command, "commands", None) or [""])
    }
    tried = {tuple(command[:2]) if command[0] == "checkpoint" else (command[0].split()[0],) for command in COMMANDS}
    assert names - {(name,) for name in NO_FILES} == tried


@pytest.mark.parametrize("key", mostly_slow(sorted(CODE_KEYS), "model.source", "data.validation_source"))
def test_looking_at_a_run_of_somebody_else_runs_nothing(key: str, folder: Path) -> None:
    document = planted(key)
    write_run(folder / "run", document)
    (folder / "some.toml").write_text(to_toml(read_config(document, "planted")))
    for command in LOOKING:
        result = run(*command)
        assert not (folder / "mark").exists(), command
        assert result.exit_code in (0, 1, 2), (command, result.output)


@pytest.mark.parametrize("key", mostly_slow(sorted(CODE_KEYS), "loss.function"))
def test_a_checkpoint_of_somebody_else_runs_nothing(key: str, folder: Path, trained: Path) -> None:
    shutil.copytree(trained, folder / "run")
    replant(folder / "run", planted(key))
    config = ["some.toml", f"output={folder / 'run'}"]
    (folder / "some.toml").write_text(to_toml(load_config(trained / "config.json")))
    for command in (
        ["generate", "run", "-n", "1"],
        ["eval", *config, "--batches", "1"],
        ["checkpoint", "list", "run"],
        ["checkpoint", "verify", "run"],
        ["checkpoint", "export", "run", "exported"],
        ["checkpoint", "diff", "run", "run"],
        ["plan", "--check", "run"],
        ["train", *config, "--resume", "training.steps=7"],
    ):
        run(*command)
        assert not (folder / "mark").exists(), command


def test_a_run_of_somebody_else_sends_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.wandb_options` of a config.json named the server that got the run's figures and the user's key."""
    sent: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        sent.append(options)
        return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=OSError, __spec__=None))  # type: ignore[arg-type]
    (folder / "text.txt").write_text("some words to learn, " * 200)
    settings = [*TINY, "data.source=text.txt", "output=out", "pipeline.workers=threads", "logging.wandb=online"]
    document = to_document(load_config(None, settings))
    document["logging"]["wandb_options"] = {"settings": {"base_url": "https://elsewhere.invalid"}}
    write_run(folder / "run", document)
    result = run("train", "run/config.json")
    assert (result.exit_code, sent) == (2, [])
    assert "elsewhere.invalid" in result.output
    assert "add --trust, or set logging.wandb=off" in result.output
    assert run("train", "run/config.json", "--trust").exit_code == 0
    assert sent[0]["settings"] == {"base_url": "https://elsewhere.invalid"}


def test_a_schedule_or_a_trace_of_somebody_else_runs_nothing(folder: Path, trained: Path) -> None:
    """All texts in them name the canary."""

    def plant(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plant(inner) for name, inner in value.items()}
        return "canary:run" if isinstance(value, str) and not value[:1].isdigit() else value

    build("1f1b", 2, 4).save(folder / "planted.json")
    for source, target in (("planted.json", "planted.json"), (trained / "timeline.json", "trace.json")):
        (folder / target).write_text(json.dumps(plant(json.loads(Path(source).read_text()))))
    (folder / "planted.csv").write_text("canary:run,0F0\n=cmd|' /C canary'!A0,1F0\n")
    for command in SCHEDULES:
        run(*command[0].split(), command[1])
        assert not (folder / "mark").exists(), command


SHADOWS = ["json", "torch", "numpy", "sitecustomize", "struct", "select", "signal", "threading", "warnings"]
FEW = SHADOWS[:4]  # what is imported before `python -m` gets to a program of ours is Python's own affair
OWN = "data.source=text.txt"
WAYS: list[Any] = [
    ("entry.py", SHADOWS, ["train", *TINY, "training.steps=1", "output=out", OWN]),
    ("entry.py", SHADOWS, ["train", "--dry-run", *TINY, OWN]),
    ("-mpenstock", FEW, ["train", *TINY, "training.steps=1", "output=out", OWN]),
    ("entry.py", SHADOWS, ["plan", "gpt", "--here", *TINY[:3], "--batch", "8", "--sequence", "16", OWN]),
]


@pytest.mark.parametrize(
    ("start", "shadows", "command"),
    mostly_exhaustive(WAYS, *WAYS[1:3]),  # the processes of `plan --here` are those of a plan by a script
    ids=["train", "dry-run", "module", "here"],
)
def test_no_process_runs_what_lies_in_the_working_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, start: str, shadows: list[str], command: list[str]
) -> None:
    """A json.py beside somebody's data was run by whatever the command started with `python -m` or `python -c`."""
    for name in shadows:
        (folder / f"{name}.py").write_text(CANARY + f"raise SystemExit('the {name}.py of the working folder ran')\n")
    (folder / "text.txt").write_text("some words to learn, " * 200)
    if start == "entry.py":  # as pip writes it
        entry = tmp_path_factory.mktemp("bin") / start
        entry.write_text("from penstock.cli import main\nif __name__ == '__main__':\n    main()\n")
        start = str(entry)
    environment = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, start, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "mark").exists()


def test_a_run_whose_folder_is_deleted_does_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained on, wrote its figures to a file without a name, and ended with exit code 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("text.txt").write_text("some words to learn, " * 200)
    Path("deleter.py").write_text(
        "import shutil\n\ndef seen(figures):\n    if figures['step'] == 2:\n        shutil.rmtree('out')\n"
    )
    settings = [*TINY, "training.steps=6", OWN, "output=out", "pipeline.workers=threads", "evaluation.every=0"]
    result = run("train", *settings, "logging.callback=deleter:seen")
    assert (result.exit_code, "metrics.jsonl was removed" in result.stderr) == (2, True), result.output


def test_a_fresh_start_removes_nothing_from_a_folder_that_holds_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of somebody else says where `output` is: it may be where your own logs are."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn, " * 200)
    Path("home/logs").mkdir(parents=True)
    Path("home/logs/precious").write_text("mine")
    Path("home/config.json").write_text('{"mine": true}')
    result = run("train", *TINY, OWN, "output=home", "--fresh")
    assert (result.exit_code, "home is not the folder of a run" in result.stderr) == (2, True), result.output
    assert Path("home/logs/precious").read_text() == "mine"


def test_every_flipped_bit_of_a_cut_is_an_error_that_names_it_or_changes_nothing(tmp_path: Path) -> None:
    """It was a KeyError. A count that is still one no longer adds up to the model's layers, which cutting finds."""
    folder, place = RunFolder(tmp_path), tmp_path / "cut.json"
    folder.keep_cut(2, [3, 4])
    good, before = place.read_bytes(), folder.cut()
    assert before == {"stages": 2, "counts": [3, 4]}
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        place.write_bytes(damaged)
        named = ""
        try:
            found = folder.cut()
        except FileError as error:
            named = error.filename
        assert named == str(place) or found == before or (found is not None and sum(found["counts"]) != 7)


def test_a_terminal_is_shown_what_it_would_obey(folder: Path) -> None:
    document = planted("model.source")
    document["\x1b]0;title\x07\x1b[2J"] = {"a": "\x9b31m\u202e"}
    write_run(folder / "run", document)
    result = run("plan", "--check", "run")
    assert result.exit_code == 2
    assert "\\x1b]0;title\\x07\\x1b[2J" in result.stderr
    assert not {character for character in result.output if ord(character) < 32} - {"\n"}
