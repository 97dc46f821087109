"""What the ranks of `penstock doctor` measure: products, links between devices, and whether the two overlap."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.devices import free_memory, mark
from penstock.tools.doctor.ranks import Place

TRIALS, WARM_UP = 5, 2
PING, PINGS = 8, 50  # numbers in a message without content, and how many are timed together
LONG = 0.005  # seconds beside which what starts an operation counts little
PRODUCTS = (512, 1024, 2048, 4096, 8192)  # the sizes to try until one takes so long
BLOCKS = (2**22, 2**24, 2**26, 2**28)  # bytes, likewise


def _seconds(place: Place, work: Callable[[], object]) -> float:
    """Return the time of `work` until the device is done: by its own events, where it has any."""
    if place.device.type == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begun = mark(place.device)
    work()
    ended = mark(place.device)
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def _median(place: Place, work: Callable[[], object]) -> float:
    return statistics.median([_seconds(place, work) for _ in range(WARM_UP + TRIALS)][WARM_UP:])


def measure_products(place: Place) -> dict[str, Any]:
    """Measure a large product, and a copy within the device's memory, while all other ranks do the same."""
    dtype = torch.float32 if place.device.type == "cpu" else torch.bfloat16
    dist.barrier()
    for size in PRODUCTS:
        a, b = (torch.randn(size, size, device=place.device).to(dtype) for _ in range(2))
        made = torch.empty_like(a)
        product = _median(place, partial(torch.mm, a, b, out=made))
        if product > LONG:
            break
    for length in BLOCKS:
        block = torch.zeros(length, dtype=torch.uint8, device=place.device)
        copy = _median(place, partial(torch.empty_like(block).copy_, block))
        if copy > LONG:
            break
    return {
        "flops": 2.0 * size**3 / product,
        "bandwidth": 2.0 * length / copy,
        "memory": _memory(place),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _memory(place: Place) -> float:
    if place.device.type != "cpu":
        return float(torch.accelerator.get_memory_info(place.device)[1])
    return free_memory() / len(os.sched_getaffinity(0))


def measure_links(place: Place) -> dict[str, Any]:
    """Measure latency and bandwidth between each two devices, one pair at a time; the lower rank of a pair reports."""
    ping = torch.zeros(PING, device=place.device)
    found = {}
    for low in range(place.world):
        for high in range(low + 1, place.world):
            if place.rank in (low, high):
                exchange = partial(_exchange, high if place.rank == low else low, place.rank == low)
                short = _median(place, partial(exchange, ping, PINGS)) / (2 * PINGS)
                length, long = _long_transfer(place, low, high, exchange)
                found[f"{low}-{high}"] = {"latency": short, "bandwidth": length / max(long / 2 - short, 1e-9)}
            dist.barrier()
    return {"pairs": {pair: figures for pair, figures in found.items() if pair.startswith(f"{place.rank}-")}}


def _exchange(peer: int, first: bool, tensor: Tensor, times: int = 1) -> None:
    """Send a tensor to and fro."""
    for _ in range(times):
        for sends in (first, not first):
            dist.send(tensor, peer) if sends else dist.recv(tensor, peer)


def _long_transfer(place: Place, low: int, high: int, transfer: Callable[[Tensor], object]) -> tuple[int, float]:
    """Return bytes of which the transfer takes long enough on the lower rank, and its seconds here."""
    for length in BLOCKS:
        block = torch.zeros(length, dtype=torch.uint8, device=place.device)
        seconds = _median(place, partial(transfer, block))
        enough = torch.tensor([seconds > LONG], device="cpu")  # both ranks go by the lower one's watch
        dist.send(enough, high) if place.rank == low else dist.recv(enough, low)
        if enough:
            break
    return length, seconds


def measure_overlap(place: Place) -> dict[str, Any]:
    """Measure kernels alone, a transfer alone and both at once: how much of the shorter is hidden by the longer.

    Ranks 0 and 1 take part; the kernels take about as long as the transfer.
    """
    found = _overlapped(place) if place.rank < 2 else {}
    dist.barrier()
    return found


def _overlapped(place: Place) -> dict[str, Any]:
    def start(block: Tensor) -> Any:
        return dist.isend(block, 1) if place.rank == 0 else dist.irecv(block, 0)

    def kernels(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=made)

    def both(count: int) -> None:
        work = start(block)
        kernels(count)
        work.wait()

    a = torch.randn(256, 256, device=place.device)
    made = torch.empty_like(a)
    length, alone = _long_transfer(place, 0, 1, lambda block: start(block).wait())
    block = torch.zeros(length, dtype=torch.uint8, device=place.device)
    count = max(1, round(10 * alone / max(_median(place, partial(kernels, 10)), 1e-9)))
    computing, transfer = _median(place, partial(kernels, count)), _median(place, lambda: start(block).wait())
    together = _median(place, partial(both, count))
    hidden = (computing + transfer - together) / min(computing, transfer)
    return {"kernels": computing, "transfer": transfer, "both": together, "hidden": min(max(hidden, 0.0), 1.0)}
