"""Files that anybody may have written are read within bounds, in one place, and errors name them."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import FileError, PenstockError
from penstock.reading import (
    DEEPEST,
    MOST_PARTS,
    check_like,
    memory_limit,
    open_plain,
    parse_json,
    parse_toml,
    plain_path,
    read_json,
    read_text,
    read_toml,
)

SOURCE = Path(penstock.__file__).parent


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path: Path) -> None:
    path.mkdir()


def text_of(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("read", [read_text, read_json, read_toml])
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (fifo, "it is not a plain file"),
        (endless, "it is not a plain file"),
        (folder, "it is not a plain file"),
        (huge, "it has 1,099,511,627,776 bytes; at most "),
    ],
)
def test_what_is_no_plain_file_of_a_sane_size_is_refused_at_once(
    prepare: Callable[[Path], None], words: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    prepare(tmp_path / "some")
    with pytest.raises(FileError, match=f"/some: {words}"):
        read(tmp_path / "some")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, "it is not JSON: maximum recursion"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), f"it nests more than {DEEPEST} deep"),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", f"it nests more than {DEEPEST} deep"),
        ('{"a": ' + "9" * 10_000 + "}", "it is not JSON: Exceeds the limit"),
        ('{"a": [' + "[]," * (MOST_PARTS + 1) + "[]]}", "it has more than 5,000,000 lists and objects"),
        ("[1]", "it holds a list, and an object is due"),
        ("null", "it holds nothing, and an object is due"),
        ("1", "it holds a number, and an object is due"),
        ('"a"', "it holds a text, and an object is due"),
        ("", "it is not JSON"),
        ('{"a": 1} x', "it is not JSON: Extra data"),
    ],
)
def test_json_is_bounded_and_of_the_kind_that_is_due(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileError, match=rf"a\.json: {words}"):
        read_json(tmp_path / "a.json")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "9" * 10_000, "it is not TOML: Exceeds the limit"),
        ("a = 0x" + "f" * 10_000, "it is not TOML: Exceeds the limit"),
        ("a = " + "[" * 5000 + "]" * 5000, "it is not TOML: "),
        (".".join(["a"] * 300) + " = 1", f"it nests more than {DEEPEST} deep"),
        ("a = ", "it is not TOML: Invalid value"),
    ],
)
def test_toml_is_bounded(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(FileError, match=rf"a\.toml: {words}"):
        read_toml(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("found", "example", "words"),
    [
        ({"a": "x"}, {"a": 0}, "a is 'x', where such a value as 0 is due"),
        ({"a": True}, {"a": 0}, "a is 'True'"),
        ({"a": 1}, {"a": True}, "a is '1'"),
        ({"a": None}, {"a": 0.5}, "a is 'NoneType'"),
        ({"a": 2**63}, {"a": 0}, "a is '9223372036854775808'"),
        ({"a": float("inf")}, {"a": 0}, "a is 'inf'"),
        ({"a": 10**400}, {"a": 0.5}, "a is '1000000"),
        ({"a": {"b": [1, []]}}, {"a": {"b": [0]}}, r"a\.b\[1\] is 'list'"),
        ({"a": {}}, {"a": []}, "a is 'dict'"),
        ({"a": [0.9]}, {"a": (0.9, 0.99)}, "a has 1 values, where 2 are due"),
        ([], {}, "it is 'list'"),
    ],
)
def test_what_is_not_like_its_example_is_named(found: Any, example: Any, words: str) -> None:
    with pytest.raises(FileError, match=f"^here: {words}"):
        check_like(found, example, "here")


@pytest.mark.parametrize(
    ("found", "example"),
    [
        ({"a": 1.5}, {"a": 3}),
        ({"a": float("inf")}, {"a": 0.5}),
        ({"more": [1]}, {"a": 3}),
        ({"a": object()}, {"a": None}),
        ({"a": [1, 2.5]}, {"a": (0.9, 0.99)}),
        ({"a": ["x"]}, {"a": []}),
    ],
)
def test_what_is_like_its_example_is_taken(found: Any, example: Any) -> None:
    check_like(found, example, "here")


def test_what_is_within_the_bounds_is_read() -> None:
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(deep, "here") == json.loads(deep)
    assert parse_json(b"3", "here") == 3
    assert parse_toml("a.b = 0x10", "here") == {"a": {"b": 16}}


def test_what_takes_too_much_memory_ends_and_leaves_no_limit_behind() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with (
        pytest.raises(FileError, match="it: what it holds takes more than 16,777,216 bytes"),
        memory_limit("it", 2**24),
    ):
        bytearray(2**30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(2**30)) == 2**30


def test_threads_share_the_limit_and_the_last_one_lifts_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with memory_limit("it", 2**24):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    with memory_limit("it", 2**40):
        pass
    assert resource.getrlimit(resource.RLIMIT_DATA) != before
    leave.set()
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_json_that_takes_far_more_memory_than_its_text_is_refused() -> None:
    """In a process of its own, which has no memory left over from other tests."""
    program = """
from penstock import reading
reading.MOST_MEMORY = 2**24
try:
    reading.parse_json("[" + "[0]," * 500_000 + "0]", "here")
except reading.FileError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "here: what it holds takes more than 16,777,216 bytes of memory\n"


def test_an_error_about_a_file_is_one_about_usage_and_one_of_the_system() -> None:
    error = pickle.loads(pickle.dumps(FileError(Path("a"), "it is empty")))
    assert isinstance(error, (PenstockError, OSError))
    assert (str(error), error.filename, error.strerror) == ("a: it is empty", "a", "it is empty")


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="embedded null byte"):
        open_plain("a\0b")
    with pytest.raises(FileNotFoundError):
        plain_path(tmp_path / "none")


# (file, what it calls): why that is not a file of somebody else. Nothing may be added without such a reason.
DIRECT = {
    "reading.py": "the one place",
    "cli/primer.py": "a program of ours",
    "cli/runs.py": "the beginning of what is_file has found to be plain",
    "cli/programs.py": "a program of ours",
    "tools/doctor/ranks.py": "what its own ranks have written, in a new folder of its own",
    "runtime/messages/plain.py": "messages, with bounds of their own",
    "runtime/messages/secret.py": "the user's own secret, with a check of its owner and a bound of its own",
    "model/transformers_models.py": "what was written a moment ago, in this process",
    "devices.py": "/proc",
    "runtime/engine/recorder.py": "/proc",
    "runtime/transport/shared_memory/meeting.py": "/proc",
    "runtime/transport/distributed/member.py": "/proc",
    "schedule/files/timeline_json.py": "what was written a moment ago, in this process",
    "tools/train/config/paths.py": "transformers' own files, where it is installed",
    "tools/train/data/tokens.py": "text of any length to train on, which find_files has found to be plain",
    "tools/train/run/baseline.py": "what the process that started this one writes to it",
    "tools/train/run/progress.py": "/proc",
    "view/page.py": "pages of ours",
    "writing.py": "makes files",
    "tools/train/launch/launch.py": "appends, to what open_plain has opened",
    "checkpoint/files/pretrained.py": "what open_plain has opened",
    "checkpoint/files/tensors.py": "what open_plain has opened",
    "tools/train/data/records.py": "what open_plain has opened, line by line",
    "checkpoint/disk/manifest.py": "a checkpoint's file, found to be plain by its status before",
    "schedule/files/reading.py": "the reader itself, with cells counted",
}


def direct_calls(path: Path) -> set[str]:
    """Return the calls in a file that open a file for reading, or parse JSON or TOML."""
    text = path.read_text()
    tree = ast.parse(text if re.search(r"open|load|read_(text|bytes)", text) else "")
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock")
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in ("open", "fdopen") and node.func.id not in ours:
            found.add(node.func.id)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes"):
            found.add(node.func.attr)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads"):
            if getattr(node.func.value, "id", "") in ("json", "tomllib"):
                found.add(f"{node.func.value.id}.{node.func.attr}")  # type: ignore[attr-defined]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "open" and node.args:
            mode = node.args[0]
            if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and mode.value.startswith("r"):
                found.add("path.open")
    return found


def test_files_are_read_in_one_place_or_there_is_a_reason() -> None:
    found = {str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py")) if direct_calls(path)}
    assert found == set(DIRECT)
