"""What a message costs on our transports, beside bare gloo, in one run.

    python bench/transport.py [--quick] [--sizes 32,1024] [--json]

Two processes on this host, all in turn, round after round, because other work disturbs a shared machine:

    raw      a loop over `dist.isend` and `dist.irecv` on fresh buffers
    gloo     `DistributedTransport`, with all its checks
    shared   `SharedMemoryTransport`, with the same checks

`ping-pong` is the time of one way, there and back in turn; `streamed` the time of a message where one rank sends
and the other keeps four receives posted ahead. Times are medians of the rounds, ratios medians of the rounds' ratios.
The receiver looks at every byte in none of them: a message counts when its value can be used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.runtime.transport import Channel, Transport
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.shared import SharedMemoryTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]
AHEAD = 4
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
    kinds: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        if way == "raw":
            kinds["ping-pong raw"] = lambda: raw_ping_pong(rank, value, count)
            kinds["streamed raw"] = lambda: raw_streamed(rank, value, count)
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


def worker(rank: int, folder: str, sizes: list[int], rounds: int, as_json: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    transports: dict[str, Transport] = {"gloo": DistributedTransport(timeout=60), "shared": SharedMemoryTransport()}
    for transport in transports.values():
        transport.open(CHANNELS)
    quiet = rank != 0 or as_json
    rows = []
    if not quiet:
        print(f"{'':>10} |        ping-pong, us one way        |       streamed, us a message        | MB/s streamed")
        print(f"{'bytes':>10} |" + f"{'raw':>8} {'gloo':>8} {'shared':>8} {'sh./gloo':>8} |" * 2 + "    gloo  shared")
    for size in sizes:
        times = measure(transports, size, rounds)
        found = {kind: statistics.median(each) for kind, each in times.items()}
        ratios = {
            f"{kind} shared/{other}": ratio(times, f"{kind} shared", f"{kind} {other}")
            for kind in ("ping-pong", "streamed")
            for other in ("gloo", "raw")
        }
        rows.append({"bytes": size, **found, **ratios})
        if not quiet:
            cells = [
                "".join(f"{found[f'{kind} {way}']:>8.1f} " for way in WAYS) + f"{ratios[f'{kind} shared/gloo']:>8.3f} |"
                for kind in ("ping-pong", "streamed")
            ]
            speeds = "".join(f"{size / found[f'streamed {way}']:>8.0f}" for way in WAYS[1:])
            print(f"{size:>10} |{''.join(cells)}{speeds}", flush=True)
    if rank == 0 and as_json:
        print(json.dumps(rows, indent=1))
    for transport in transports.values():
        transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--sizes", type=str, default="", help="bytes, separated by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    sizes = sizes or [32 << shift for shift in ((0, 8, 16) if options.quick else (*range(0, 20, 2), 20, 21))]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (str(Path(folder)), sizes, 5 if options.quick else 15, options.json), nprocs=2)


if __name__ == "__main__":
    main()
