"""What the benches of steps share: gloo processes on this host, contestants in turn, ratios. Tables: see `report`.

The machine is shared and noisy, so no time is worth anything alone. Every round runs each contestant once, in an order
that turns with the round, from a barrier to the last rank's end. A ratio is the median of the rounds' ratios, each
taken within one round: what slows a round down slows both of its sides.

Contestants of a round share a process, and so its heap. glibc gives free memory at the end of a heap back to the system
and takes it again, for some 3 % of a step's time, or does not, by what else lies there: one contestant's memory would
decide about the other's time. So the processes of a bench keep the memory that they have (`keep_memory`).
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining as theirs
from torch.nn.functional import scaled_dot_product_attention

from penstock.runtime.transport.distributed.member import loop_threads
from penstock.schedule import Placement

Step = Callable[[], object]

THEIRS = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "looped-bfs": theirs.ScheduleLoopedBFS,
    "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
    "interleaved-zb": theirs.ScheduleInterleavedZeroBubble,
    "zb-v": theirs.ScheduleZBVZeroBubble,
    "dualpipe-v": theirs.schedules.ScheduleDualPipeV,
}
WAYS = {"ours": None, "ours, gloo": "distributed"}  # Pipeline(transport=...): by default shared memory on one host
SEVERAL = ("looped-bfs", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")  # stages per rank
V = ("zb-v", "dualpipe-v")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def run_ranks(worker: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """`worker(rank, *arguments)` on as many processes, joined by gloo, one thread each; none outlives this call."""
    with tempfile.TemporaryDirectory() as folder:
        places = (ranks, str(Path(folder) / "rendezvous"), worker, arguments)
        running = mp.spawn(_start, places, nprocs=ranks, join=False, daemon=True)  # also if interrupted right here
        try:
            while not running.join():
                pass
        finally:
            for process in running.processes:
                process.terminate()  # nothing where it has ended
                process.join()


def keep_memory() -> None:
    """Have this process keep all memory that it frees, where its allocator is glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest that it takes


def _start(rank: int, ranks: int, path: str, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    try:
        worker(rank, *arguments)
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A transformer block: causal attention and an MLP, each with its norm and its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x))


class Times:
    """What each contestant took in each round, on the slowest rank: seconds, and seconds of processor time.

    Processor time of the calling thread is what is left of a comparison where other work keeps the cores busy: it
    counts the work done, and not the waiting for a core, for a peer, or for gloo's own thread.
    """

    def __init__(self, seconds: Mapping[str, list[float]], busy: Mapping[str, list[float]]) -> None:
        self.seconds = dict(seconds)
        self.busy = dict(busy)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        return _ratio(self.seconds[name], self.seconds[other])

    def busy_ratio(self, name: str, other: str) -> float:
        return _ratio(self.busy[name], self.busy[other])


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Within rounds, so that what disturbs a round disturbs both."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def interleave(contestants: Mapping[str, Step], rounds: int, warm_up: int = 2) -> Times:
    """Run all in turn. Called on every rank with the same names; every rank gets the same times."""
    names = list(contestants)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            dist.barrier()
            start, busy = time.perf_counter(), time.thread_time()
            contestants[name]()
            if turn >= warm_up:
                spent[name].append((time.perf_counter() - start, time.thread_time() - busy))
    table = torch.tensor([spent[name] for name in names], dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    seconds, work = table.unbind(-1)
    return Times(dict(zip(names, seconds.tolist(), strict=True)), dict(zip(names, work.tolist(), strict=True)))


def only(rank: int, mine: int, step: Step) -> Step:
    """For what one process does while the others wait."""
    return step if rank == mine else lambda: None


def without_ours(step: Step) -> Step:
    """A step of a peer, with gloo's threads as it would find them: a pipeline of ours holds them back."""
    threads = loop_threads()

    def peer() -> object:
        _set_policy(threads, os.SCHED_OTHER)
        try:
            return step()
        finally:
            _set_policy(threads, os.SCHED_BATCH)

    return peer


def _set_policy(threads: Sequence[int], policy: int) -> None:
    for thread in threads:
        with suppress(ProcessLookupError):  # that of a connection which is closed by now
            os.sched_setscheduler(thread, policy, os.sched_param(0))


def torch_pipeline(
    family: str, rank: int, modules: Sequence[nn.Module], count: int, loss_fn: Any, x: torch.Tensor, y: torch.Tensor
) -> Step:
    """A step of torch.distributed.pipelining on this rank's stages of `modules`."""
    ranks = dist.get_world_size()
    stages = len(modules)
    placement = Placement.v(ranks) if family in V else Placement.loop(ranks, stages // ranks)
    mine = placement.stages_of(rank)
    device = torch.device("cpu")
    parts = [theirs.PipelineStage(modules[stage], stage, stages, device) for stage in mine]
    single = not issubclass(THEIRS[family], theirs.schedules.PipelineScheduleMulti)
    schedule = THEIRS[family](parts[0] if single else parts, count, loss_fn)
    args = (x,) if 0 in mine else ()
    target = {"target": y} if stages - 1 in mine else {}

    def step() -> None:
        losses: list[torch.Tensor] = []
        schedule.step(*args, **target, losses=losses if target else None, return_outputs=False)

    return without_ours(step)
