"""Somebody who may write to the folder of a run has put links, FIFOs and directories where its files will be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.saved_files import PRECIOUS, fifo, link

from penstock.checkpoint.disk.plain_files import create
from penstock.errors import UsageError
from penstock.reading import open_plain, read_text
from penstock.train.config.read import load_config
from penstock.train.launch.launch import APPEND
from penstock.train.launch.rank_notes import read_note
from penstock.train.run.metrics import Metrics, read_metrics
from penstock.train.run.run_folder import RunFolder, write_json


@pytest.mark.timeout(30)
@pytest.mark.parametrize("prepare", [link, fifo])
def test_what_a_run_writes_about_itself_takes_the_place_of_what_was_prepared(
    prepare: Callable[[Path, Path], None], elsewhere: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "metrics.jsonl"):
        for ending in ("", ".partial"):
            prepare(tmp_path / f"{name}{ending}", elsewhere)
    write_json(tmp_path / "config.json", {"a": 1})
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.write(1, loss=2.0)
    metrics.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    prepare(tmp_path / "ready", elsewhere)
    create(tmp_path / "ready").close()
    prepare(tmp_path / "incidents.jsonl", elsewhere)
    with pytest.raises(OSError, match=r"it is a symlink|No such device"):  # a FIFO that nobody reads cannot be opened
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
