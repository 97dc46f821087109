"""What a checkpoint costs: the pause of training, and seconds for a gigabyte, beside torch.save and plain DCP.

    penstock bench checkpoint [--quick] [--json] [--rounds 7]

Two gloo processes train a pipeline of two stages with AdamW. In every round each contestant saves the state of model
and optimizer to the same disk, once beside a few steps of training and once alone. All end with their files synced:

    ours, async      Checkpointer.save: the copy; a thread writes, with checksums, manifest and rename
    ours, sync       the same with async_save=False, without the copy
    torch.save       each process its own file, then fsync: no names, no other layout, no checksum of the whole
    DCP, async       torch.distributed.checkpoint.async_save of the same tensors
    DCP, sync        torch.distributed.checkpoint.save

    pause    until the call returns, on the slower process
    lost     what the save and the steps beside it took longer than the same steps alone
    whole    until the checkpoint is whole and on the disk, with nothing beside it; also as seconds for a gigabyte
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import run_ranks
from report import Column, Goal, Report, bench
from torch import nn

import penstock

STEPS = 4  # beside each save
Begin = Callable[[Path], Callable[[], object]]  # saves; what it returns waits until that is whole


def main() -> None:
    with bench(__doc__, 7) as settings, tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be memory
        run_ranks(compare, 2, settings, folder)


def compare(rank: int, settings: Namespace, folder: str) -> None:
    width, layers = (64, 4) if settings.quick else (1024, 12)
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    x, y = torch.randn(2, 64, width).unbind()

    def train() -> None:
        for _ in range(STEPS):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()

    train()
    state = tensors_of(pipe, optimizer)
    size = torch.tensor(float(sum(tensor.nbytes for tensor in state.values())))
    dist.all_reduce(size)
    contestants = {
        "ours, async": ours(pipe, optimizer, True),
        "ours, sync": ours(pipe, optimizer, False),
        "torch.save": lambda path: torch_save(state, path, rank),
        "DCP, async": dcp_async(state),
        "DCP, sync": lambda path: dcp_sync(state, path),
    }
    times = measure(contestants, train, settings.rounds, Path(folder), rank)
    tell(
        settings.report, rank, times, size.item() / 1e9, f"{layers} x Linear({width}, {width}) with AdamW, 2 gloo ranks"
    )
    pipe.close()


def tensors_of(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The same tensors for everybody."""
    named = dict(pipe.named_parameters())
    found = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value
    return found


def ours(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, background: bool) -> Begin:
    kept: dict[Path, penstock.Checkpointer] = {}

    def begin(path: Path) -> Callable[[], object]:
        if path.parent not in kept:
            kept[path.parent] = penstock.Checkpointer(path.parent, keep_last=1, async_save=background)
        checkpointer = kept[path.parent]
        checkpointer.save(int(path.name), pipe, optimizer)
        return checkpointer.wait

    return begin


def torch_save(state: dict[str, torch.Tensor], path: Path, rank: int) -> Callable[[], object]:
    path.mkdir(parents=True, exist_ok=True)
    with (path / f"{rank}.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return dist.barrier


def dcp_sync(state: dict[str, Any], path: Path) -> Callable[[], object]:
    dcp.save(state, checkpoint_id=path)
    return lambda: None


def dcp_async(state: dict[str, Any]) -> Begin:
    group = dist.new_group(backend="gloo")  # its thread must not use training's own

    def begin(path: Path) -> Callable[[], object]:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        return future.result  # type: ignore[union-attr]

    return begin


def measure(
    contestants: dict[str, Begin], train: Callable[[], None], rounds: int, folder: Path, rank: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds on the slower process, for each round."""
    names = list(contestants)
    spent: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        train()
        alone = time.perf_counter() - start
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            path = folder / name.replace(", ", "-") / str(turn)
            dist.barrier()
            start = time.perf_counter()
            wait = contestants[name](path)
            pause = time.perf_counter() - start
            train()
            beside = time.perf_counter() - start
            wait()
            dist.barrier()
            start = time.perf_counter()
            contestants[name](path.with_name(f"{turn}0000"))()
            whole = time.perf_counter() - start
            if turn:  # the first round asks for memory
                spent[name].append([pause, beside - alone, whole])
            dist.barrier()
            if rank == 0 and not name.startswith("ours"):
                shutil.rmtree(path.parent)
    table = torch.tensor([spent[name] for name in names], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {
        name: dict(zip(("pause", "lost", "whole"), columns.T.tolist(), strict=True))
        for name, columns in zip(names, table, strict=True)
    }


def tell(report: Report, rank: int, times: dict[str, dict[str, list[float]]], gigabytes: float, title: str) -> None:
    columns = [Column("who", 12), *(Column(f"{what} ms", 9) for what in ("pause", "lost", "whole"))]
    columns += [Column("s/GB", 6, "{:.2f}"), Column("pause / DCP, async", 26, "{:.2f}")]
    full = f"{title}: {gigabytes:.3f} GB in {len(times['torch.save']['pause'])} rounds"
    table = report.table(rank, full, columns)
    for name, each in times.items():
        pause, lost, whole = (1000 * statistics.median(each[column]) for column in ("pause", "lost", "whole"))
        ratio = statistics.median(
            one / other for one, other in zip(each["pause"], times["DCP, async"]["pause"], strict=True)
        )
        goal = Goal(ratio, 1.0) if name == "ours, async" else ratio
        table.row(name, pause, lost, whole, whole / 1000 / gigabytes, goal)


if __name__ == "__main__":
    main()
