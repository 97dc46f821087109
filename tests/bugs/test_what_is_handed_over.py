"""A run, a checkpoint, a model or an adapter of somebody else: what it leads to, and what it makes of sizes.

Each of these was done to a user by a folder that somebody handed over, before the mend beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run

import penstock
from penstock.checkpoint.disk.manifest import seal
from penstock.checkpoint.files.pretrained_writing import write_tokenizer
from penstock.errors import UsageError
from penstock.reading import open_plain
from penstock.tools.train.config.read import load_config
from penstock.tools.train.run.memory import KINDS
from penstock.tools.train.run.run_folder import OWN_FOLDERS, RunFolder

PRECIOUS = "mine"
TINY = ["model.options.layers=2", "model.options.width=16", "model.options.heads=2", "data.sequence=16", "data.batch=8"]
TINY += ["pipeline.ranks=2", "pipeline.microbatches=2", "training.steps=6", "logging.tensorboard=off"]
TINY += ["pipeline.workers=threads"]


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_a_link_in_a_run_does_not_have_a_folder_of_the_user_cleared(name: str, tmp_path: Path) -> None:
    """Whoever unpacks an archive owns the links in it: the owner of a link does not show who wished for it."""
    root, other = tmp_path / "run", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (other / "step-00000001").mkdir()
    (root / name).symlink_to(other)
    for fresh in (False, True):
        config = load_config(None, [f"output={root}"])
        (root / "config.json").write_text(json.dumps({"pipeline": {}, "training": {}, "output": ""}))
        with pytest.raises(UsageError, match=rf"/run/{name}: a symlink, .* output"):
            RunFolder(root).prepare(config, resume=not fresh, fresh=fresh)
    assert [each.name for each in other.iterdir()] == ["step-00000001"]


def test_the_folder_of_a_run_may_be_a_link_itself(tmp_path: Path) -> None:
    """It is named by the user, and not by what is in it."""
    (tmp_path / "large").mkdir()
    (tmp_path / "run").symlink_to("large")
    config = load_config(None, [f"output={tmp_path / 'run'}"])
    RunFolder(tmp_path / "run").prepare(config, resume=False, fresh=False).free()
    assert (tmp_path / "large" / "config.json").is_file()


@pytest.mark.parametrize("name", [".lock", "incidents.jsonl"])
def test_a_second_name_of_another_file_is_not_written_through(name: str, tmp_path: Path) -> None:
    """An archive may hold a hard link to a file outside of it; a lock is emptied when it is taken."""
    (tmp_path / "precious").write_text(PRECIOUS)
    os.link(tmp_path / "precious", tmp_path / name)
    with pytest.raises(OSError, match=rf"/{name.replace('.', '[.]')}: it is a hard link"):
        open_plain(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    assert (tmp_path / "precious").read_text() == PRECIOUS
    os.close(open_plain(tmp_path / name))  # to read it is another matter


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "spiece.model"])
def test_an_export_takes_no_file_of_elsewhere_along(name: str, tmp_path: Path) -> None:
    """An export is made to be given away; a link in the model's folder put a key of the user's into it."""
    for folder in ("model", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "precious").write_text(PRECIOUS)
    (tmp_path / "model" / name).symlink_to("../precious")
    for tokenizer, origin in ((None, {"folder": str(tmp_path / "model")}), (str(tmp_path / "model"), None)):
        with pytest.raises(UsageError, match=rf"{name}: it is a link to .*/precious, outside of"):
            write_tokenizer(tmp_path / "out", tokenizer, origin)
    assert not list((tmp_path / "out").iterdir())


def test_an_export_follows_the_links_of_the_hub_s_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some" / "snapshots" / "f00d"
    snapshot.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "models--some" / "blobs").mkdir()
    (tmp_path / "models--some" / "blobs" / "1234").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1234")
    assert write_tokenizer(tmp_path / "out", snapshot, None) == ["tokenizer.json"]
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("text", ["-----BEGIN PRIVATE KEY-----", '{"auths": {"some": "password"}}', "[1]"])
def test_an_export_takes_only_a_tokenizer_for_a_tokenizer(text: str, tmp_path: Path) -> None:
    """The configuration in a checkpoint, which may be anybody's, names the file: data.tokenizer."""
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text(text)
    with pytest.raises((UsageError, OSError), match=r"/precious: it (is not JSON|holds a list|is no tokenizer)"):
        write_tokenizer(tmp_path / "out", str(tmp_path / "precious"), None)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_the_doctor_writes_a_new_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in the working folder had another file written over, and a FIFO had the command wait at its end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.tools.doctor.examine.examine", lambda *_: iter(()))
    Path("precious").write_text(PRECIOUS)
    for name in ("penstock-doctor.json",):
        if kind == "link":
            Path(name).symlink_to("precious")
        else:
            os.mkfifo(name)
    assert run("doctor").exit_code == 0
    assert json.loads(Path("penstock-doctor.json").read_text())["findings"] == []
    assert Path("precious").read_text() == PRECIOUS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny run of four steps, with a recorded timeline and a checkpoint."""
    root = tmp_path_factory.mktemp("trained") / "run"
    text = root.parent / "text.txt"
    text.write_text("some words to learn, " * 200)
    settings = [*TINY, f"data.source={text}", f"output={root}", "logging.every=2", "evaluation.every=0"]
    result = run("train", *settings)
    assert result.exit_code == 0, result.output
    return root


def forged(trained: Path, folder: Path, key: str, value: Any) -> Path:
    """Copy a run, with another value for a key of its configuration, and of those in its checkpoints."""
    shutil.copytree(trained, folder)
    (path,) = (folder / "checkpoints").glob("step-*")
    manifest = json.loads((path / "manifest.json").read_text())
    body = {name: inner for name, inner in manifest.items() if name not in ("format", "version", "checksum")}
    table: Any = body["config"]
    *outer, name = key.split(".")
    for each in outer:
        table = table[each]
    table[name] = value
    (path / "manifest.json").write_bytes(seal(body))
    (folder / "config.json").write_text(json.dumps(body["config"]))
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.options.vocabulary", 10**30, "vocabulary is 10{30}; it takes"),
        ("model.options.vocabulary", 10**9, "model.options.vocabulary is 10{9}, not 256"),
        ("model.options.layers", 10**9, "layers is 10{9}; it takes a whole number from 1 to 10000"),
        ("model.options.layers", 9000, "model.options.layers is 9000, not 2"),
        ("model.options.layers", -1, "layers is -1; it takes"),
        ("model.options.width", 10**6, "model.options.width is 10{6}, not 16"),
        ("model.options.context", 10**9, "model.options.context is 10{9}, not 16"),
        ("model.options.heads", 3, "model.options.width is 16, which 3 heads cannot share evenly"),
        ("model.options.heads", 10**15, "heads is 10{15}; a whole number is at most"),
        ("data.sequence", 10**9, "context is 10{9}, not 16|a step of 8,000,000,000 tokens"),
        ("data.sequence", 10**6, "model.options.context is 10{6}, not 16"),
    ],
)
def test_sizes_in_a_checkpoint_s_configuration_are_those_of_its_tensors(
    key: str, value: int, words: str, trained: Path, tmp_path: Path
) -> None:
    """A billion layers were built one by one, and the memory of any vocabulary was asked for."""
    folder = forged(trained, tmp_path / "run", key, value)
    for command in (["generate", folder, "-n", "1"], ["eval", folder / "config.json", f"output={folder}"]):
        result = run(*command)
        assert result.exit_code == 2
        assert re.search(words, result.stderr), result.stderr
        assert str(folder) in result.stderr


@pytest.mark.parametrize("counts", [[2, 3], [1, 10**12]])
def test_a_flipped_count_of_a_cut_is_an_error_that_names_the_file(
    counts: list[int], trained: Path, tmp_path: Path
) -> None:
    """Training reported a balance that nobody had asked for, and a plan took another cut in silence."""
    folder = forged(trained, tmp_path / "run", "pipeline.balance", "memory")
    (folder / "cut.json").write_text(json.dumps({"stages": 2, "counts": counts}))
    training = ["train", folder / "config.json", f"output={folder}", "--resume", "training.steps=7"]
    for command in (training, ["plan", "--check", folder]):
        result = run(*command)
        assert result.exit_code == 2
        assert re.search(rf"{folder}/cut.json: .*{sum(counts)}.*remove the file", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.options.heads", 3, "model.options.width is 16, which 3 heads cannot share evenly"),
        ("model.options.layers", 10**9, "model.options: layers is 10{9}; it takes"),
    ],
)
def test_what_does_not_go_together_in_a_run_is_reported_with_its_path(
    key: str, value: int, words: str, trained: Path, tmp_path: Path
) -> None:
    folder = forged(trained, tmp_path / "run", key, value)
    for command in (["--check", folder], ["--from", folder], ["gpt", "--from", folder]):
        result = run("plan", *command)
        assert result.exit_code == 2
        assert re.search(f"{folder}/config.json: {words}", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.json", "[[1, 2]]"),
        ("memory.json", "{}"),
        ("memory.json", '[{"weights": 1}]'),
        ("memory.json", "{kinds}-1{end}"),
        ("memory.json", "{kinds}1e300{end}"),
        ("memory.json", '{kinds}"much"{end}'),
        ("memory.json", "{kinds}null{end}"),
        ("timeline.json", "[]"),
        ("timeline.json", "{}"),
        ("timeline.json", '{"schedule": {"rows": [["0F0"]]}, "spans": []}'),
        ("metrics.jsonl", '{"step": 1, "seconds": "long"}\n'),
        ("metrics.jsonl", '{"step": 1, "seconds": 1e999}\n'),
        ("metrics.jsonl", "[1]\n"),
    ],
)
def test_what_is_damaged_in_a_run_is_named_by_a_plan(name: str, text: str, trained: Path, tmp_path: Path) -> None:
    """Each was a raw error of what was computed with it, or a plan with nonsense in it."""
    shutil.copytree(trained, tmp_path / "run")
    kinds = "".join(f'"{kind}": 1, ' for kind in KINDS)
    text = text.replace("{kinds}", f'[{{{kinds}"process": ').replace("{end}", "}]")
    (tmp_path / "run" / name).write_text(text)
    result = run("plan", "--check", tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert f"{tmp_path}/run/{name}" in result.stderr


@pytest.mark.slow
def test_a_plan_from_a_script_elsewhere_runs_nothing_of_the_working_folder(tmp_path: Path) -> None:
    """The command's processes were kept from it; those of `penstock.plan()` ran a pickle.py beside somebody's data."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name in ("pickle", "socket", "struct", "selectors", "threading", "json"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nraise SystemExit('it ran')\n")
    (here / "text.txt").write_text("some words to learn, " * 200)
    (there / "script.py").write_text(
        "import os, penstock\nfrom penstock.planner.layout import MeshLayout\n\nif __name__ == '__main__':\n"
        "    options = {'layers': 2, 'width': 16, 'heads': 2}\n"
        "    more = {'schedules': ['1f1b'], 'layout': MeshLayout(2), 'devices': 2}\n"
        "    plans = penstock.plan('gpt', options=options, batch=2, sequence=16, **more)\n"
        "    assert plans.ranked and 'PYTHONSAFEPATH' not in os.environ\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, str(there / "script.py")]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert not (tmp_path / "mark").exists()
    assert done.returncode == 0, done.stderr
