"""Whether a run on a busy machine stays healthy: no false alarm, and memory, descriptors and threads stay flat.

    penstock bench soak --minutes 60 --hogs 20    an hour beside twenty processes that never rest
    penstock bench soak --quick                   some seconds, two of them

Four processes train one model over both transports in turn, at the default timeout, with a batch of another size and
length at each step; some steps are evaluated instead. Once per interval every rank says what it holds. `memory` is what
it has resident without what it shares, `shared` the memory that it shares with its peers, `/dev/shm` what the whole
machine has there. A value is flat if its maximum in the second half of the run is about that of the first half.

oneDNN keeps what it compiled for 1024 shapes, so that a plain loop over such sizes grows, too
(docs/guides/out-of-memory.md); here it keeps nothing, and what grows is ours.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from common import Block, run_ranks
from report import Column, Goal, at_least_one, bench
from torch import nn

import penstock
from penstock.parallel.group.world import ON_PROCESSES

RANKS, WIDTH, HEADS = 4, 64, 4
LIMITS = {"memory MB": 1.1, "shared MB": 1.1, "descriptors": 1.0, "threads": 1.0}  # second half / first half
NEVER_REST = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
COLUMNS = [
    Column("seconds", 7, "{:.0f}"),
    Column("load"),
    Column("rank"),
    Column("steps"),
    Column("slowest s", 9, "{:.2f}"),
    *(Column(name) for name in LIMITS),
    Column("/dev/shm MB"),
]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=at_least_one, default=10, help="how long to train (default 10)")
    parser.add_argument("--hogs", type=at_least_one, default=20, help="busy processes beside the ranks (default 20)")


def main() -> None:
    with bench(__doc__, more=options) as settings, ExitStack() as stack:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # of the ranks
        settings.duration, settings.interval = (6.0, 1.0) if settings.quick else (settings.minutes * 60.0, 60.0)
        for _ in range(2 if settings.quick else settings.hogs):
            hog = stack.enter_context(subprocess.Popen([sys.executable, "-c", NEVER_REST]))
            stack.callback(hog.kill)
        run_ranks(train, RANKS, settings)


def train(rank: int, settings: Namespace) -> None:
    torch.manual_seed(0)
    stages = [Block(WIDTH, HEADS) for _ in range(RANKS)]
    pipes = [
        penstock.Pipeline(stages, microbatches=4, loss_fn=nn.functional.mse_loss, transport=kind)
        for kind in ON_PROCESSES
    ]
    optimizer = torch.optim.SGD(pipes[0].parameters(), lr=1e-3)
    rows = settings.report.table(rank, f"{RANKS} processes, sizes that change", COLUMNS)
    chance = random.Random(0)  # the same sizes on every rank
    start = said = time.monotonic()
    found: list[torch.Tensor] = []
    count, slowest = 0, 0.0
    going = True
    while going:
        begin = time.monotonic()
        x = torch.randn(chance.randint(4, 64), chance.randint(1, 96), WIDTH)
        pipe = pipes[count % 2]
        if chance.random() < 0.1:
            pipe.evaluate(x, target=x)
        else:
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
        count, slowest, now = count + 1, max(slowest, time.monotonic() - begin), time.monotonic()
        word = torch.tensor([now - start < settings.duration, now - said >= settings.interval])
        dist.broadcast(word, 0)
        going, due = word.tolist()
        if due or not going:
            held = [torch.zeros(len(COLUMNS), dtype=torch.float64) for _ in range(RANKS)]
            mine = [now - start, os.getloadavg()[0], rank, count, slowest, *what_is_held()]
            dist.all_gather(held, torch.tensor(mine, dtype=torch.float64))
            for numbers in held:
                rows.row(*(int(number) if number.is_integer() else number for number in numbers.tolist()))
            found.append(torch.stack(held))
            said, slowest = now, 0.0
    judge(rank, settings, torch.stack(found))


def what_is_held() -> list[float]:
    """Of this process, in the order of the columns; the last is the machine's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {name: text.split()[0] for name, _, text in (line.partition(":") for line in lines) if text.split()}
    memory, shared = int(status["RssAnon"]) / 1024, int(status["RssShmem"]) / 1024
    place = os.statvfs("/dev/shm")
    named = (place.f_blocks - place.f_bfree) * place.f_frsize / 2**20
    return [memory, shared, len(os.listdir("/proc/self/fd")), int(status["Threads"]), named]


def judge(rank: int, settings: Namespace, found: torch.Tensor) -> None:
    """`found`: a value for each interval, rank and column."""
    names = [column.name for column in COLUMNS]
    table = settings.report.table(
        rank, "flat: the maximum of each half", [Column("what", 12), Column("first"), Column("second"), Column("ratio")]
    )
    half = (len(found) + 1) // 2
    for name, limit in LIMITS.items():
        values = found[..., names.index(name)]
        first, second = values[:half].amax().item(), values[len(found) - half :].amax().item()
        table.row(name, first, second, Goal(second / first, limit))


if __name__ == "__main__":
    main()
