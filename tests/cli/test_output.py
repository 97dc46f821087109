"""What the command writes, and what it refuses to write."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from command import run

from penstock.cli.output import complain, working
from penstock.errors import RunError

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")


def test_a_full_disk_is_named_by_the_stream_that_met_it() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "show", "1f1b"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "penstock: stdout: No space left on device\n")


@pytest.mark.parametrize(
    "line",
    ["simulate 1f1b --forward 1e308 --json", "simulate 1f1b --activation 1e308", "compare --weight 1e308 --json"],
)
def test_numbers_that_overflow_are_refused_and_never_printed(line: str) -> None:
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "too large to be added up" in result.stderr


@pytest.mark.parametrize("ask", [lambda: torch.empty(2**55), lambda: bytes(2**62)], ids=["torch", "python"])
def test_an_error_for_want_of_memory_names_the_work(ask: Callable[[], object]) -> None:
    """All of them reported that the schedule did not fit."""
    with pytest.raises(RunError, match=r"^loading needs more memory than this machine has$"), working("loading"):
        ask()


def test_other_errors_are_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^another$"), working("loading"):
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("line", "place", "words"),
    [
        ("show 1f1b", "penstock.cli.source:build", "penstock show needs .*; try fewer ranks or microbatches$"),
        ("checkpoint list run", "penstock.cli.checkpoint:checkpoints_at", "penstock list needs more memory .* has$"),
    ],
)
def test_a_command_for_want_of_memory_names_itself(
    line: str, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    module, _, name = place.partition(":")
    monkeypatch.setattr(import_module(module), name, fail)
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(words, result.stderr.strip()), result.stderr


def test_a_message_with_megabytes_of_somebodys_text_is_cut_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    complain("a" * 15_000 + "b" * 15_000)
    text = capsys.readouterr().err
    assert text == f"penstock: {'a' * 10_000} ... 10,000 characters left out ... {'b' * 10_000}\n"
