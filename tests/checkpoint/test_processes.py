"""Checkpoints of several processes: they agree, fail together, and each gets back what was its own."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import nn
from train_runs import LAYOUTS, Data, Run

import penstock
from penstock.checkpoint.disk import lock
from penstock.checkpoint.disk.manifest import checkpoints_in
from penstock.errors import CheckpointError, PenstockError

THREE = LAYOUTS["interleaved"]


def message_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except PenstockError as error:
        return str(error)
    return "nothing raised"


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]


def save_while_training(folder: Path) -> None:
    """Async, bit for bit, and every process its own generators and data position."""
    rank = dist.get_rank()
    run = Run(**THREE)
    random.seed(rank)
    torch.manual_seed(rank + 10)
    run.steps(2)
    with penstock.Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(2, run.pipe, run.optimizer, scheduler=run.scheduler, data=run.data, config={"lr": 1e-2})
        drawn = (random.random(), torch.rand(3).tolist())
        after = run.steps(2)
        checkpointer.save(4, run.pipe, run.optimizer, **run.parts())
        checkpointer.wait()
        run.close()
        run = Run(seed=3, **THREE)
        loaded = checkpointer.load(run.pipe, run.optimizer, path=folder / "run" / "step-00000002", **run.parts())
        assert (loaded.step, loaded.config, loaded.generators) == (2, {"lr": 1e-2}, "own")
        assert (random.random(), torch.rand(3).tolist()) == drawn
        assert run.steps(2) == after
        assert checkpointer.load(run.pipe, run.optimizer, **run.parts()).step == 4
        run.close()
    checkpointer.wait()  # after all is closed


def a_disk_that_is_full_on_one_host(folder: Path) -> None:
    rank = dist.get_rank()
    run = Run(**THREE)
    run.step()
    with penstock.Checkpointer(folder / "full") as checkpointer:
        checkpointer.save(1, run.pipe, run.optimizer)
        checkpointer.wait()
        if rank == 2:  # the kernel refuses to write more into any file of this process
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        checkpointer.save(2, run.pipe, run.optimizer)
        said = message_of(checkpointer.wait)
        assert "File too large" in said, said
        assert "step 2 could not be saved" in said
        assert ("process 2" in said) == (rank != 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        assert hidden_in(folder / "full") == []
        assert [named.step for named in checkpoints_in(folder / "full")] == [1]
        assert run.step() > 0  # the group is as it was
        checkpointer.save(3, run.pipe, run.optimizer)
        checkpointer.wait()
        assert [named.step for named in checkpoints_in(folder / "full")] == [1, 3]
    run.close()


class Unsavable(Data):
    def state_dict(self) -> dict[str, Any]:
        return {"it": object()} if dist.get_rank() == 1 else {}


class Broken(Data):
    def state_dict(self) -> dict[str, Any]:
        return {"position": 1 // (dist.get_rank() - 1)}


def mistakes_of_one_process(folder: Path) -> None:
    rank = dist.get_rank()
    run = Run(**THREE)
    checkpointer = penstock.Checkpointer(folder / "mistakes")
    said = message_of(lambda: checkpointer.save(1, run.pipe, data=Unsavable()))
    assert "data.state_dict()['it'] is a builtins.object" in said
    assert ("process 1" in said) == (rank != 1)
    if rank == 1:
        with pytest.raises(ZeroDivisionError):  # the user's own error, as it is
            checkpointer.save(1, run.pipe, data=Broken())
    else:
        with pytest.raises(CheckpointError, match="process 1: ZeroDivisionError"):
            checkpointer.save(1, run.pipe, data=Broken())
    assert "different steps to save: [0, 1, 2]" in message_of(lambda: checkpointer.save(rank, run.pipe))
    dist.barrier()
    assert hidden_in(folder / "mistakes") == []
    dist.barrier()
    checkpointer.save(7, run.pipe)
    checkpointer.close()
    dist.barrier()
    file = folder / "mistakes" / "step-00000007" / "process-00001.safetensors"
    if rank == 0:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    assert f"{file} is damaged" in message_of(lambda: penstock.load(folder / "mistakes" / "step-00000007", run.pipe))
    run.close()


def a_process_that_owns_nothing(folder: Path) -> None:
    def made() -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
        modules = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
        pipe = penstock.Pipeline(modules, microbatches=2, loss_fn=nn.functional.mse_loss)
        return pipe, torch.optim.Adam(pipe.parameters(), lr=0.1)

    pipe, optimizer = made()
    x = torch.ones(4, 4)

    def step() -> float:
        loss = pipe.step(x, target=x).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    penstock.save(folder / "nothing", pipe, optimizer)
    after = [step(), step()]
    pipe.close()
    pipe, optimizer = made()
    penstock.load(folder / "nothing", pipe, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]  # also where the group has no parameter
    assert [step(), step()] == after
    pipe.close()


def two_runs_at_once(folder: Path) -> None:
    """Every process is a run of its own here; the first has the directory."""
    lock.PATIENCE = 0.2
    pipe = penstock.Pipeline([nn.Linear(2, 2)], microbatches=1, transport="threads")
    checkpointer = penstock.Checkpointer(folder / "one")
    if dist.get_rank() == 0:
        checkpointer.save(1, pipe)
        checkpointer.wait()
    dist.barrier()
    if dist.get_rank() == 1:
        said = message_of(lambda: checkpointer.save(2, pipe))
        assert "is being written to by process" in said, said
        assert checkpointer.load(pipe).step == 1  # reading is free
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    if dist.get_rank() == 1:
        with penstock.Checkpointer(folder / "one") as mine:
            mine.save(2, pipe)
    dist.barrier()
    assert [named.step for named in checkpoints_in(folder / "one")] == [1, 2]
    pipe.close()


def everything(folder: str) -> None:
    place = Path(folder)
    save_while_training(place)
    a_disk_that_is_full_on_one_host(place)
    mistakes_of_one_process(place)
    a_process_that_owns_nothing(place)
    two_runs_at_once(place)


@pytest.mark.slow
def test_processes_agree_fail_together_and_get_back_their_own(tmp_path: Path) -> None:
    on_processes(3, everything, str(tmp_path))
