"""What a run shows: one redrawn line on a terminal, ranks' own output by filter, TensorBoard where it is there."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
from train_jobs import TINY, gone, job, prepare
from warm import WarmProcess

from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.launch import torchrun_command
from penstock.tools.train.run.progress import Progress, StepFigures


def test_on_a_terminal_there_is_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        progress = Progress(terminal, 100)
        for step in range(1, 4):
            progress.show(StepFigures(step, 9, 1.0 / step, 1e-3, 0.5, 10.0, 1_000_000, None, 3.0))
        progress.write("something else")
        progress.close()
        told = b""
        while b"something else" not in told:  # a terminal hands over what it has so far
            told += os.read(ours, 100_000)
    os.close(ours)
    written = told.decode()
    for step in range(1, 4):
        assert f"step {step}/9" in written  # every step, though every 100th only is a line of its own in a file
    assert "\x1b[" in written  # back to the start of the line
    assert "something else" in written


def test_a_reader_that_leaves_ends_the_lines_and_not_the_training() -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w", buffering=1) as stream:
        progress = Progress(stream, 1)
        progress.write("heard")
        os.close(ours)
        for step in range(1, 4):
            progress.show(StepFigures(step, 9, 1.0, 1e-3, 0.5, 10.0, 1_000_000, None, 3.0))
        progress.write("not heard")
        progress.close()


# Ctrl-C as soon as the launcher has started the second of four ranks, before it knows their numbers itself.
INTERRUPTED_START = """
import os, signal, sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from penstock.cli import main

start, started = BaseProcess.start, []

def interrupted(process):
    start(process)
    started.append(process.pid)
    if len(started) == 2:
        Path("started").write_text(" ".join(map(str, started)))
        os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":  # and not in a rank
    BaseProcess.start = interrupted
    sys.argv[0] = "penstock"
    main()
"""


@pytest.mark.slow
def test_ctrl_c_while_ranks_are_started_ends_those_that_were(tmp_path: Path) -> None:
    """The launcher knew none of them yet. It said that it left at once, and then waited for them, which waited for the
    others for two minutes; or they ended with tracebacks of their own."""
    prepare(tmp_path)
    (tmp_path / "start.py").write_text(INTERRUPTED_START)
    with (tmp_path / "log.txt").open("wb") as log:
        arguments = [str(tmp_path / "start.py"), "train", *TINY, "mesh.replicas=2", "training.steps=3", "output=run"]
        command = WarmProcess(["python", *arguments], tmp_path, log)
        try:
            code = command.wait(60)
        finally:
            command.kill()
    words = (tmp_path / "log.txt").read_text()
    assert code == 130, words
    assert words == "penstock: left at once; what was saved before is whole\n"
    assert gone([int(pid) for pid in (tmp_path / "started").read_text().split()])


def test_the_command_for_several_hosts_has_all_ranks() -> None:
    config = load_config(None, ["pipeline.ranks=3", "launch.max_restarts=2"])
    command = torchrun_command(config, ["my run.toml", "seed=2"])
    assert "--nnodes=3 --nproc-per-node=1 --max-restarts=2" in command
    assert "rdzv" not in command, "torchrun's c10d rendezvous unpickles what anybody who reaches it has written"
    assert command.endswith("-m penstock train 'my run.toml' seed=2")
    replicas = load_config(None, ["pipeline.ranks=3", "mesh.replicas=2"])
    assert "--nnodes=2 --nproc-per-node=3" in torchrun_command(replicas, [])


def test_the_command_of_an_elastic_run_says_which_numbers_of_hosts_will_do() -> None:
    config = load_config(None, ["pipeline.ranks=2", "mesh.replicas=2", "launch.elastic=true"])
    command = torchrun_command(config, [])
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PYTHONSAFEPATH=1 torchrun --nnodes=1:2 --nproc-per-node=2" in command
    assert "--rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29400" in command
    assert "elastic: 4 (2 ranks x 2 replicas, 2 stages, 8 microbatches), 2 (2 ranks" in command
    fixed = load_config(
        None, ["pipeline.ranks=3", "pipeline.schedule=zb-v", "pipeline.stages=6", "launch.elastic=true"]
    )
    assert "--nnodes=3 --nproc-per-node=1" in torchrun_command(fixed, [])  # nothing smaller has a layout


@pytest.mark.exhaustive
def test_replicas_train_as_one_and_ranks_are_heard_by_filter(tmp_path: Path) -> None:
    """Two replicas of two ranks: the losses of one pipeline on the whole batch, saved and gone on with."""
    chatty = tmp_path / "chatty.py"
    chatty.write_text(
        "import logging, os\nfrom traps import Rows\n\n\ndef rows():\n"
        "    print('hello from', os.environ['RANK'], flush=True)\n    logging.info('told')\n    return Rows()\n"
    )
    common = ["data.source=chatty:rows", "data.batch=8", "pipeline.microbatches=2", "model.options.dropout=0"]
    losses = {}
    for name, settings in {
        "one": ["pipeline.microbatches=4"],
        "ddp": ["mesh.replicas=2", "logging.ranks=[2]"],
        "fsdp": ["mesh.replicas=2", "mesh.replicate=fsdp"],
    }.items():
        with job(tmp_path, *common, "training.steps=6", *settings, f"output={name}") as run:
            run.output = tmp_path / name
            assert run.wait() == 0, run.log
            losses[name] = run.losses
            if name == "ddp":
                assert "[rank 2] hello from 2" in run.log
                assert "[rank 2] INFO root: told" in run.log
                assert "hello from 1" not in run.log
                assert any("hello from 1" in path.read_text() for path in (run.output / "logs").rglob("stdout.log"))
    assert losses["ddp"] == pytest.approx(losses["one"], rel=1e-5)
    assert losses["fsdp"] == pytest.approx(losses["one"], rel=1e-5)
