"""What the ranks of `penstock doctor` measure: products, links between devices, and whether the two overlap."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.doctor.ranks import Place

TRIALS, WARM_UP = 5, 2
PING, PINGS = 8, 50  # numbers in a message without content, and how many are timed together


def _seconds(place: Place, work: Callable[[], object]) -> float:
    """Return the time of `work` until the device is done: by its own events, where it has any."""
    if place.device.type == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begun, ended = (torch.Event(device=place.device, enable_timing=True) for _ in range(2))
    begun.record()
    work()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def _median(place: Place, work: Callable[[], object]) -> float:
    return statistics.median([_seconds(place, work) for _ in range(WARM_UP + TRIALS)][WARM_UP:])


def measure_products(place: Place) -> dict[str, Any]:
    """Measure a large product, and a copy within the device's memory, while all other ranks do the same."""
    on_host = place.device.type == "cpu"
    size, dtype = (512, torch.float32) if on_host else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
    made, block = torch.empty_like(a), torch.empty(2**24 if on_host else 2**28, dtype=torch.uint8, device=place.device)
    copied = torch.empty_like(block)
    dist.barrier()
    product = _median(place, lambda: torch.mm(a, b, out=made))
    copy = _median(place, lambda: copied.copy_(block))
    return {
        "flops": 2.0 * size**3 / product,
        "bandwidth": 2.0 * block.numel() / copy,
        "memory": _memory(place),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _memory(place: Place) -> float:
    if place.device.type != "cpu":
        return float(torch.accelerator.get_memory_info(place.device)[1])
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return available / len(os.sched_getaffinity(0))


def measure_links(place: Place) -> dict[str, Any]:
    """Measure latency and bandwidth between each two devices, one pair at a time; the lower rank of a pair reports."""
    block = torch.zeros(2**23 if place.device.type == "cpu" else 2**26, dtype=torch.uint8, device=place.device)
    ping = torch.zeros(PING, device=place.device)
    found = {}
    for low in range(place.world):
        for high in range(low + 1, place.world):
            if place.rank in (low, high):
                peer, first = (high, True) if place.rank == low else (low, False)

                def exchange(tensor: torch.Tensor, times: int = 1, peer: int = peer, first: bool = first) -> None:
                    for _ in range(times):
                        for sends in (first, not first):
                            dist.send(tensor, peer) if sends else dist.recv(tensor, peer)

                short = _median(place, partial(exchange, ping, PINGS)) / (2 * PINGS)
                long = _median(place, partial(exchange, block)) / 2
                found[f"{low}-{high}"] = {"latency": short, "bandwidth": block.numel() / max(long - short, 1e-9)}
            dist.barrier()
    return {"pairs": {pair: figures for pair, figures in found.items() if pair.startswith(f"{place.rank}-")}}


def measure_overlap(place: Place) -> dict[str, Any]:
    """Measure kernels alone, a transfer alone and both at once: how much of the shorter is hidden by the longer.

    Ranks 0 and 1 take part; the kernels take about as long as the transfer.
    """
    if place.rank > 1:
        dist.barrier()
        return {}
    peer = 1 - place.rank
    on_host = place.device.type == "cpu"
    block = torch.zeros(2**24 if on_host else 2**27, dtype=torch.uint8, device=place.device)
    a = torch.randn(256 if on_host else 2048, 256 if on_host else 2048, device=place.device)
    made = torch.empty_like(a)

    def start() -> Any:
        return dist.isend(block, peer) if place.rank == 0 else dist.irecv(block, peer)

    def transfer() -> None:
        start().wait()

    def kernels(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=made)

    def both(count: int) -> None:
        work = start()
        kernels(count)
        work.wait()

    alone = _median(place, transfer)
    count = max(1, round(alone / max(_median(place, lambda: kernels(10)) / 10, 1e-9)))  # each rank for itself
    computing, transfer_alone = _median(place, lambda: kernels(count)), _median(place, transfer)
    together = _median(place, lambda: both(count))
    dist.barrier()
    hidden = (computing + transfer_alone - together) / min(computing, transfer_alone)
    return {"kernels": computing, "transfer": transfer_alone, "both": together, "hidden": min(max(hidden, 0.0), 1.0)}
