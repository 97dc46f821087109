"""What a message costs on our transport, beside bare gloo, in one run.

    python bench/transport.py [--quick] [--sizes 32,1024] [--json]

Two processes on this host. `ping-pong` is the time of one way, there and back in turn; `streamed`
the time of a message where one rank sends and the other keeps four receives posted ahead.
`raw` is a loop over `dist.isend` and `dist.irecv` on fresh buffers, `ours` the transport with
all its checks. Both are run in turn, round after round, because other work disturbs a shared machine;
the tables show medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.runtime.transport import Channel
from penstock.runtime.transport.distributed import DistributedTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]
AHEAD = 4


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
    works: deque = deque()
    for index in range(count + AHEAD):
        if index < count:
            if rank == 0:
                works.append(dist.isend(value, 1, tag=1))
            else:
                came = torch.empty_like(value)
                works.append(dist.irecv(came, 0, tag=1))
        if index >= AHEAD:
            works.popleft().wait()


def our_ping_pong(transport: DistributedTransport, value: torch.Tensor, count: int) -> None:
    for index in range(count):
        if transport.rank == 0:
            transport.post(1, index)
            transport.send(0, index, value)
            transport.receive(1, index)
        else:
            transport.receive(0, index)
            transport.send(1, index, value)


def our_streamed(transport: DistributedTransport, value: torch.Tensor, count: int) -> None:
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


def measure(transport: DistributedTransport, size: int, rounds: int) -> dict[str, float]:
    """Medians in microseconds a message."""
    rank = transport.rank
    value = torch.zeros(max(size // 4, 1))
    count = max(6, min(200, (32 << 20) // max(size, 1)))
    kinds = {
        "ping-pong raw": lambda: raw_ping_pong(rank, value, count),
        "ping-pong ours": lambda: our_ping_pong(transport, value, count),
        "streamed raw": lambda: raw_streamed(rank, value, count),
        "streamed ours": lambda: our_streamed(transport, value, count),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 2):  # two rounds to warm up: the first of ours also learns the layout
        for kind, run in kinds.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            seconds = time.perf_counter() - start
            transport.exchange(None)
            if turn >= 2:
                times[kind].append(seconds / count / (2 if kind.startswith("ping") else 1) * 1e6)
    return {kind: statistics.median(found) for kind, found in times.items()}


def worker(rank: int, folder: str, sizes: list[int], rounds: int, as_json: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    transport = DistributedTransport(timeout=60)
    transport.open(CHANNELS)
    rows = []
    if rank == 0 and not as_json:
        print(f"{'bytes':>10} | {'ping-pong: raw':>15} {'ours':>9} {'ratio':>6} | ", end="")
        print(f"{'streamed: raw':>14} {'ours':>9} {'ratio':>6} | {'ours':>10}   (us a message)")
    for size in sizes:
        found = measure(transport, size, rounds)
        ping = found["ping-pong ours"] / found["ping-pong raw"]
        stream = found["streamed ours"] / found["streamed raw"]
        rows.append({"bytes": size, "ping-pong ratio": ping, "streamed ratio": stream, **found})
        if rank == 0 and not as_json:
            print(
                f"{size:>10} | {found['ping-pong raw']:>15.1f} {found['ping-pong ours']:>9.1f} {ping:>6.2f} | ", end=""
            )
            print(f"{found['streamed raw']:>14.1f} {found['streamed ours']:>9.1f} {stream:>6.2f} | ", end="")
            print(f"{size / found['streamed ours']:>7.0f} MB/s", flush=True)
    if rank == 0 and as_json:
        print(json.dumps(rows, indent=1))
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--sizes", type=str, default="", help="bytes, separated by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    sizes = sizes or [32 << shift for shift in ((0, 8, 16) if options.quick else range(0, 20, 2))]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (str(Path(folder)), sizes, 5 if options.quick else 15, options.json), nprocs=2)


if __name__ == "__main__":
    main()
