"""How long it takes until every rank knows of a failure.

    penstock bench failures            each kind of failure five times, on four processes of this host
    penstock bench failures --quick    once

One rank raises an error or is killed in the middle of a step. `told` is the time from then until the last of the other
ranks has a `PeerFailure` in its hands, `first` until the first of them has it.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Column, Goal, bench
from torch import nn

import penstock
from penstock.errors import PeerFailure
from penstock.parallel.group.world import ON_PROCESSES

RANKS, VICTIM, SECONDS = 4, 2, 5.0
TRANSPORTS = tuple(ON_PROCESSES)
KINDS = ("an error", "killed")
COLUMNS = [
    Column("failure", 10),
    Column("transport", 12),
    Column("first s", 10, "{:.3f}"),
    Column("told s", 20, "{:.3f}"),
]


class Fails(nn.Linear):
    """Fails in its second microbatch once it is told to, after it has written down the time."""

    notes: Path | None = None
    kind = ""
    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.notes is not None and self.calls % 4 == 2:
            self.notes.write_text(str(time.monotonic()))
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("on purpose")
        return super().forward(input)


def worker(rank: int, folder: str, kind: str, transport: str) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    stages = [Fails(8, 8) for _ in range(RANKS)]
    pipe = penstock.Pipeline(
        stages, microbatches=4, loss_fn=nn.functional.mse_loss, transport=transport, timeout=60, seed=0
    )
    x = torch.ones(8, 8)
    pipe.step(x, target=x)
    if rank == VICTIM:
        stages[VICTIM].notes, stages[VICTIM].kind = Path(folder) / "fault", kind
    try:
        pipe.step(x, target=x)
    except PeerFailure:
        if rank != VICTIM:
            (Path(folder) / f"told {rank}").write_text(str(time.monotonic()))
    os._exit(0)


def measured(kind: str, transport: str) -> tuple[float, float]:
    """Seconds until the first and the last of the others know."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(rank, folder, kind, transport), daemon=True) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        told = [float(path.read_text()) for path in Path(folder).glob("told *")]
        fault = float((Path(folder) / "fault").read_text())
    if len(told) < RANKS - 1:
        raise SystemExit(f"{kind}, {transport}: only {len(told)} of {RANKS - 1} ranks were told")
    return min(told) - fault, max(told) - fault


def main() -> None:
    with bench(__doc__, rounds=5) as settings:
        table = settings.report.table(0, f"{RANKS} processes, one fails in a step; medians and the worst", COLUMNS)
        for kind in KINDS:
            for transport in TRANSPORTS[: 1 if settings.quick else None]:
                found = [measured(kind, transport) for _ in range(1 if settings.quick else settings.rounds)]
                first = statistics.median(first for first, _ in found)
                table.row(kind, transport, first, Goal(max(told for _, told in found), SECONDS))


if __name__ == "__main__":
    main()
