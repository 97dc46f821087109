"""What a message costs on our transports, beside bare gloo, in one run.

    penstock bench transport [--quick] [--json] [--rounds 15] [--sizes 32,1024]

Two processes on this host, all in turn, round after round, because other work disturbs a shared machine:

    raw      a loop over `dist.isend` and `dist.irecv` on fresh buffers
    gloo     `DistributedTransport`, with all its checks
    shared   `SharedMemoryTransport`, with the same checks

`ping-pong` is the time of one way, there and back in turn; `streamed` the time of a message where one rank sends
and the other keeps four receives posted ahead. Times are medians of the rounds, ratios medians of the rounds' ratios.
The receiver looks at every byte in none of them: a message counts when its value can be used.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from common import Step, run_ranks, without_ours
from report import Column, at_least_one, bench

from penstock.runtime.transport import Channel, Transport
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]
AHEAD = 4
SIZES = [32 << shift for shift in (*range(0, 20, 2), 20, 21)]
QUICK_SIZES = [32 << shift for shift in (0, 8, 16)]
WAYS = ("raw", "gloo", "shared")
Times = dict[str, list[float]]


def raw_ping_pong(rank: int, value: torch.Tensor, count: int) -> None:
    for _ in range(count):
        came = torch.empty_like(value)
        if rank == 0:
            receive = dist.irecv(came, 1, tag=2)
            send = dist.isend(value, 1, tag=1)
            receive.wait()
            send.wait()
        else:
            dist.irecv(came, 0, tag=1).wait()
            dist.isend(value, 0, tag=2).wait()


def raw_streamed(rank: int, value: torch.Tensor, count: int) -> None:
    works: deque[Any] = deque()
    for index in range(count + AHEAD):
        if index < count:
            if rank == 0:
                works.append(dist.isend(value, 1, tag=1))
            else:
                came = torch.empty_like(value)
                works.append(dist.irecv(came, 0, tag=1))
        if index >= AHEAD:
            works.popleft().wait()


def our_ping_pong(transport: Transport, value: torch.Tensor, count: int) -> None:
    for index in range(count):
        if transport.rank == 0:
            transport.post(1, index)
            transport.send(0, index, value)
            transport.receive(1, index)
        else:
            transport.receive(0, index)
            transport.send(1, index, value)


def our_streamed(transport: Transport, value: torch.Tensor, count: int) -> None:
    for index in range(count + AHEAD):
        if transport.rank == 0:
            if index < count:
                transport.send(0, index, value)
        else:
            if index < count:
                transport.post(0, index)
            if index >= AHEAD:
                transport.receive(0, index - AHEAD)
    transport.flush()


def measure(transports: dict[str, Transport], size: int, rounds: int) -> Times:
    """Microseconds a message, by kind and way, round by round."""
    rank = transports["gloo"].rank
    value = torch.zeros(max(size // 4, 1))
    count = max(6, min(200, (32 << 20) // max(size, 1)))
    kinds: dict[str, Step] = {}
    for way in WAYS:
        if way == "raw":
            kinds["ping-pong raw"] = without_ours(lambda: raw_ping_pong(rank, value, count))
            kinds["streamed raw"] = without_ours(lambda: raw_streamed(rank, value, count))
        else:
            kinds[f"ping-pong {way}"] = lambda way=way: our_ping_pong(transports[way], value, count)
            kinds[f"streamed {way}"] = lambda way=way: our_streamed(transports[way], value, count)
    times: Times = {kind: [] for kind in kinds}
    for turn in range(rounds + 2):  # two rounds to warm up: the first of ours also learns the layout
        for kind, run in kinds.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            seconds = time.perf_counter() - start
            for transport in transports.values():
                transport.exchange(None)
            if turn >= 2:
                times[kind].append(seconds / count / (2 if kind.startswith("ping") else 1) * 1e6)
    return times


def ratio(times: Times, one: str, other: str) -> float:
    """Within rounds, so that what disturbs a round disturbs both."""
    return statistics.median(left / right for left, right in zip(times[one], times[other], strict=True))


def worker(rank: int, settings: Namespace) -> None:
    transports: dict[str, Transport] = {"gloo": DistributedTransport(timeout=60), "shared": SharedMemoryTransport()}
    for transport in transports.values():
        transport.open(CHANNELS)
    columns = [Column("bytes", 10), Column("how", 9), *(Column(f"{way} us", 10) for way in WAYS)]
    columns += [Column(f"shared/{other}", 11, "{:.3f}") for other in ("gloo", "raw")]
    columns += [Column(f"{way} MB/s", 11, "{:.0f}") for way in WAYS[1:]]
    table = settings.report.table(rank, "2 processes, one message: us one way, and ratios", columns)
    for size in settings.sizes or (QUICK_SIZES if settings.quick else SIZES):
        times = measure(transports, size, settings.rounds)
        for how in ("ping-pong", "streamed"):
            found = [statistics.median(times[f"{how} {way}"]) for way in WAYS]
            ratios = [ratio(times, f"{how} shared", f"{how} {other}") for other in ("gloo", "raw")]
            table.row(size, how, *found, *ratios, *(size / microseconds for microseconds in found[1:]))
    for transport in transports.values():
        transport.close()


def whole_numbers(text: str) -> list[int]:
    return [at_least_one(size) for size in text.split(",") if size]


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--sizes", type=whole_numbers, default=[], help="bytes, with commas (default 32 to 64 MiB)")

    with bench(__doc__, 15, more=more) as settings:
        run_ranks(worker, 2, settings)


if __name__ == "__main__":
    main()
