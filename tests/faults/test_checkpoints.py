"""Killed at any moment, the middle of saving included: what can be seen is whole, and training goes on from there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import launch
from tiers import tiers
from train_runs import LAYOUTS, Run

import penstock
from penstock.checkpoint.disk import directory
from penstock.checkpoint.disk.manifest import checkpoints_in, damages, read_manifest
from penstock.checkpoint.files import tensors as body
from penstock.checkpoint.save import saving
from penstock.errors import PeerFailure

Say = Callable[[Any], None]
STEPS = 8
POINTS = [
    "the first byte",
    "half of the file",
    "the note",
    "the index",
    "the manifest",
    "the rename",
    "after the rename",
    "the deletion",
]


def kill_at(point: str) -> None:
    """Die there, the third time: two checkpoints are whole by then."""
    times = [0]

    def spring(now: bool = True) -> None:
        times[0] += now
        if times[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    write_file, write, rename, removed = body.write_file, os.write, Path.rename, saving.remove
    names = {"the note": ".note", "the index": "index.json", "the manifest": "manifest.json"}

    def watched(path: Path, pieces: Any) -> tuple[int, str]:
        if point in names and path.name.startswith(names[point]):
            spring()
        if point in ("the first byte", "half of the file") and path.suffix == ".safetensors":
            pieces = [b"".join(bytes(piece) for piece in pieces)]

            def half(descriptor: int, content: Any) -> int:
                if point == "half of the file" and times[0] == 2:
                    write(descriptor, bytes(content)[: len(content) // 2])
                spring()
                return write(descriptor, content)

            body.os.write = half  # type: ignore[assignment]
            try:
                return write_file(path, pieces)
            finally:
                body.os.write = write
        return write_file(path, pieces)

    def renamed(path: Path, goal: Path) -> Path:
        spring(point == "the rename" and goal.name.startswith("step-"))
        found = rename(path, goal)
        spring(point == "after the rename" and goal.name.startswith("step-"))
        return found

    def removing(path: Path) -> None:
        if point == "the deletion":
            goal = path.with_name(f".trash-{path.name}")
            rename(path, goal)
            next(goal.iterdir()).unlink()
            spring()
            shutil.rmtree(goal)
        else:
            removed(path)

    saving.write_file = watched
    Path.rename = renamed  # type: ignore[method-assign, assignment]
    directory.remove = removing


def save_until_killed(say: Say, folder: str, point: str) -> None:
    run = Run(tied=False, **LAYOUTS["two stages"])
    kill_at(point)
    with penstock.Checkpointer(folder, keep_last=2) as checkpointer:
        for step in range(1, STEPS):
            run.step()
            checkpointer.save(step, run.pipe, run.optimizer, **run.parts())
            checkpointer.wait()
            say(step)


def all_whole(folder: Path) -> list[int]:
    """The steps of what can be seen; every byte of it is right."""
    for named in checkpoints_in(folder):
        assert list(damages(named.path, read_manifest(named.path), sums=True)) == []
    return [named.step for named in checkpoints_in(folder)]


@cache
def straight(layout: str) -> list[float]:
    run = Run(tied=False, **LAYOUTS[layout])
    losses = run.steps(STEPS)
    run.close()
    return losses


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[pytest.mark.slow] * (point != "half of the file")) for point in POINTS]
)
def test_killed_in_the_middle_of_saving(point: str, tmp_path: Path) -> None:
    (ending,) = launch(1, save_until_killed, str(tmp_path), point)
    assert ending.code == -signal.SIGKILL, ending.error
    steps = all_whole(tmp_path)
    assert max(steps) >= max(ending.said)  # nothing that was said to be saved is lost
    assert len(steps) >= 2
    run = Run(seed=3, tied=False, **LAYOUTS["two stages"])
    with penstock.Checkpointer(tmp_path, keep_last=2) as checkpointer:
        done = checkpointer.load(run.pipe, run.optimizer, **run.parts()).step
        assert done == max(steps)
        assert run.steps(STEPS - done) == straight("two stages")[done:]
        checkpointer.save(STEPS, run.pipe)
    run.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") and path.name != ".lock"]


def train_until_killed(say: Say, folder: str, victim: int, delay: float | None) -> None:
    """Resume, and train to the end with a save after every step; one rank dies at some moment."""
    run = Run(seed=2, tied=False, timeout=20.0, **LAYOUTS["two stages"])
    checkpointer = penstock.Checkpointer(folder, keep_last=2)
    done = 0
    if checkpointer.latest() is not None:
        done = checkpointer.load(run.pipe, run.optimizer, **run.parts()).step
    else:
        run = Run(tied=False, timeout=20.0, **LAYOUTS["two stages"])
    dist.barrier()
    if delay is not None and dist.get_rank() == victim:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for step in range(done + 1, STEPS + 1):
        say((step, run.step()))
        checkpointer.save(step, run.pipe, run.optimizer, **run.parts())
    checkpointer.wait()
    say("all saved")
    checkpointer.close()
    run.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", tiers(3, 14))
def test_a_rank_killed_at_random_moments_changes_no_loss(kills: int, tmp_path: Path) -> None:
    chance = random.Random(kills)
    losses: dict[int, set[float]] = {}
    for number in range(kills + 1):
        delay = chance.uniform(0.0, 0.4) if number < kills else None
        endings = launch(2, train_until_killed, str(tmp_path), chance.randrange(2), delay)
        for ending in endings:
            for said in ending.said:
                if isinstance(said, tuple):
                    losses.setdefault(said[0], set()).add(said[1])
        steps = all_whole(tmp_path)
        if "all saved" in endings[0].said:
            assert max(steps) == STEPS
        assert all(ending.code is not None for ending in endings), "a rank hangs"
        if delay is None:
            assert [ending.code for ending in endings] == [0, 0], endings[0].error + endings[1].error
            assert len(losses) == STEPS
    undisturbed = launch(2, train_until_killed, str(tmp_path / "undisturbed"), 0, None)[0].said
    assert {step: {loss} for step, loss in undisturbed[:STEPS]} == losses
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    assert hidden == []


def save_until_a_replica_dies(say: Say, folder: str, exchanges: int) -> None:
    """The second replica dies after so many exchanges of a save; the first says what it raised."""
    mesh = penstock.mesh(pp=1, dp=2)
    run = Run(plain=True, mesh=mesh, stages=1, schedule="gpipe", timeout=20.0)
    run.step()
    link = run.pipe.deployment.replication._link
    gather, left = link.all_gather, [exchanges]

    def gather_and_die(call: str, value: Any) -> list[Any]:
        answers: list[Any] = gather(call, value)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    if dist.get_rank() == 1:
        link.all_gather = gather_and_die
    checkpointer = penstock.Checkpointer(folder, async_save=False)
    try:
        checkpointer.save(1, run.pipe, run.optimizer)
    except PeerFailure as failure:
        say((failure.rank, failure.replica))


@pytest.mark.slow
def test_a_replica_that_dies_in_the_middle_of_a_save_is_named(tmp_path: Path) -> None:
    """Replicas used to meet in a collective of torch's, after all had said that they were there. One that died in
    between was an error of gloo's, which names nobody."""
    for exchanges in (1, 2, 3):
        survivor, dead = launch(2, save_until_a_replica_dies, str(tmp_path / str(exchanges)), exchanges)
        assert dead.code == -signal.SIGKILL, dead.error
        assert survivor.said == [(0, 1)], survivor.error
