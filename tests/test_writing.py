"""Somebody who may write to the folder of a run has put links, FIFOs and directories where its files will be."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint.saved_files import PRECIOUS, fifo, link
from command import run

from penstock.errors import UsageError
from penstock.reading import open_plain, read_text
from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.launch import APPEND
from penstock.tools.train.launch.rank_notes import read_note
from penstock.tools.train.run.metrics import Metrics, read_metrics
from penstock.tools.train.run.run_folder import RunFolder, write_json
from penstock.writing import create, save, write_whole


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of the user's that has nothing to do with the run."""
    path = tmp_path_factory.mktemp("elsewhere") / "precious"
    path.write_text(PRECIOUS)
    return path


@pytest.mark.timeout(30)
@pytest.mark.parametrize("prepare", [link, fifo])
def test_what_a_run_writes_about_itself_takes_the_place_of_what_was_prepared(
    prepare: Callable[[Path, Path], None], elsewhere: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "metrics.jsonl", "metrics.jsonl.partial"):
        prepare(tmp_path / name, elsewhere)
    write_json(tmp_path / "config.json", {"a": 1})
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.write(1, loss=2.0)
    metrics.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    prepare(tmp_path / "ready", elsewhere)
    create(tmp_path / "ready").close()
    prepare(tmp_path / "incidents.jsonl", elsewhere)
    with pytest.raises(OSError, match=r"it is a symlink|it is not a plain file"):
        open_plain(tmp_path / "incidents.jsonl", APPEND)
    assert elsewhere.read_text() == PRECIOUS
    assert not list(tmp_path.glob("*.partial"))


def test_an_output_that_was_prepared_is_refused_with_the_name_of_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"it is a symlink, which is not followed; remove it \(.*/\.lock\)"):
        RunFolder(tmp_path).prepare(load_config(None, [f"output={tmp_path}"]), resume=False, fresh=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.timeout(30)
def test_nothing_that_is_read_waits_for_a_writer_or_fills_the_memory(tmp_path: Path) -> None:
    for name in ("cut.json", "note", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert read_note(tmp_path / "note") is None
    with pytest.raises(OSError, match="not a plain file"):
        RunFolder(tmp_path).cut()
    with pytest.raises(OSError, match="not a plain file"):
        read_metrics(tmp_path / "metrics.jsonl")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="at most 16,777,216 are read"):
        read_text(tmp_path / "huge")


def second_name(path: Path, elsewhere: Path) -> None:
    """Give another file a second name."""
    path.hardlink_to(elsewhere)


SAVING = [
    ["show", "1f1b", "-r", "2", "-m", "2", "--save", "out.csv"],
    ["show", "1f1b", "-r", "2", "-m", "2", "--save", "out.json"],
    *(["view", "1f1b", "-r", "2", "-m", "2", f"--{kind}", f"out.{kind}"] for kind in ("html", "svg", "png", "trace")),
    ["studio", "--out", "out.html"],
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("prepare", [link, fifo, second_name])
@pytest.mark.parametrize("command", SAVING, ids=lambda command: f"{command[0]} {command[-1]}")
def test_no_command_writes_through_what_was_prepared_where_it_saves(
    command: list[str],
    prepare: Callable[[Path, Path], None],
    elsewhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--html`, `--save` and `--out` wrote over the file that a link of somebody's leads to, or waited for a FIFO."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path / command[-1], elsewhere)
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert f"{command[-1]}: it is " in result.output
    assert elsewhere.read_text() == PRECIOUS


def test_what_cannot_be_written_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    save(path, "first")
    with pytest.raises(UnicodeEncodeError):
        save(path, "second \ud800")
    assert path.read_text() == "first"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", "second")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "page.html"]


def test_several_that_save_one_file_at_once_leave_the_whole_of_one_of_them(tmp_path: Path) -> None:
    """All ranks of a script save what all have; they took the half-written file, of one name, from each other."""
    path, texts = tmp_path / "run.json", [letter * 300_000 for letter in "abcd"]
    with ThreadPoolExecutor(len(texts)) as pool:
        for _ in range(20):
            list(pool.map(lambda text: save(path, text), texts))
            assert path.read_text() in texts
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_an_output_of_the_shell_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`penstock doctor --out /dev/stdout` of root would have had a file in the place of the device."""
    code = "from penstock.writing import save, write_whole; from pathlib import Path; save('/dev/stdout', 'a')"
    code += "; write_whole(Path('/dev/stderr'), 'b')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("a", "b", 0)
    for write in (save, write_whole):
        write(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()


# file: why it does not write through `penstock.writing`. Nothing may be added without such a reason.
DIRECT = {
    "writing.py": "the one place",
    "integrations/transformers/trainer.py": "a checkpoint's folder, which transformers has just made",
    "planner/here.py": "a new folder of its own",
    "tools/train/launch/launch.py": "appends, to what open_plain has opened",
}


def test_files_are_written_in_one_place_or_there_is_a_reason() -> None:
    source = Path(__file__).resolve().parents[1] / "src" / "penstock"
    found = set()
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if re.search(r"open\(|write_(text|bytes)", text) else "")):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            modes = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            if name in ("write_text", "write_bytes") or (name == "open" and {"w", "a", "wb", "x", "ab"} & set(modes)):
                found.add(str(path.relative_to(source)))
    assert found == set(DIRECT)
