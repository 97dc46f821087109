"""Saves in the background: what they hold up, and how they fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint.saved_files import fill_the_disk, names
from train_runs import Run

import penstock
from penstock.checkpoint.files import tensors as body_module
from penstock.checkpoint.save import saving
from penstock.errors import CheckpointError


def test_only_the_copy_holds_training_up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held back here, and save() returns all the same; what is written is what was there at save()."""
    go = threading.Event()
    write = os.write
    threads = set()

    def slow(descriptor: int, content: Any) -> int:
        threads.add(threading.current_thread())
        assert go.wait(30)
        return write(descriptor, content)

    monkeypatch.setattr(body_module.os, "write", slow)
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe, run.optimizer, **run.parts())
        after = run.steps(2)
        assert names(tmp_path)[0].startswith(".step-00000001.")
        assert checkpointer.latest() is None
        checkpointer.save(3, run.pipe)  # a second copy, while the first is not even begun
        go.set()
        checkpointer.wait()
        assert threading.main_thread() not in threads
        checkpointer.load(run.pipe, run.optimizer, path=tmp_path / "step-00000001", **run.parts())
        assert run.steps(2) == after


def test_close_says_what_went_wrong(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = penstock.Checkpointer(tmp_path)
    fill_the_disk(monkeypatch, 0)
    checkpointer.save(1, run.pipe)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.close()
    checkpointer.close()


def test_an_error_of_the_loop_is_not_hidden_by_one_of_a_save(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, 0)
    checkpointer = penstock.Checkpointer(tmp_path)

    def loop() -> None:
        with checkpointer:
            checkpointer.save(1, run.pipe)
            raise ZeroDivisionError("of the loop")

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert "No space left" in caught.value.__notes__[0]


def test_a_save_that_failed_does_not_take_the_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.Checkpointer(tmp_path, async_save=False) as checkpointer:
        with monkeypatch.context() as patch:
            fill_the_disk(patch, 0)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpointer.save(1, run.pipe)
        checkpointer.save(1, run.pipe)
    assert names(tmp_path) == ["step-00000001"]


def test_an_interrupt_ends_a_save_that_reads_the_parameters_themselves(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, the program may change them: what the thread has not written by then must not become a checkpoint."""
    write_file, ended = saving.write_file, threading.Event()
    give_up = saving.Saving.give_up

    def told(self: saving.Saving, reason: BaseException) -> None:
        give_up(self, reason)
        ended.set()

    def interrupted(path: Path, pieces: Any) -> tuple[int, str]:
        if path.suffix == ".safetensors":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert ended.wait(60)
        return write_file(path, pieces)

    with penstock.Checkpointer(tmp_path, async_save=False) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(saving.Saving, "give_up", told)
            patched.setattr(saving, "write_file", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, run.pipe, run.optimizer)
        deadline = time.monotonic() + 60
        while names(tmp_path) and time.monotonic() < deadline:  # the thread that gave up clears away
            time.sleep(0.01)
        assert names(tmp_path) == []
        checkpointer.save(2, run.pipe, run.optimizer)
        assert names(tmp_path) == ["step-00000002"]
