"""How well a recorded run predicts others: step times predicted from one recording against measured ones.

    python bench/calibration.py [--quick] [--rounds 15] [--schedules gpipe,1f1b,...] [--width 512]

Two gloo processes, balanced stages (the same layers on each rank, one thread each). For each schedule, 8 microbatches
are recorded a few times; the recording of median makespan is saved as `penstock whatif` would read it. From it the step
time of the same schedule with 4, 8 and 16 microbatches is predicted, and measured without recording, in turn with the
recorded one so that what disturbs the machine disturbs both. `step` is the makespan and what the recording spent
outside of it. Then every other schedule of as many stages is predicted from the first one's recording.

The error is (predicted - measured) / measured; the goal is at most 5 % on balanced compute.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from common import Table, interleave, options, run_ranks
from torch import Tensor, nn

import penstock
from penstock.schedule import Costs, Timeline, build, simulate
from penstock.view.account import account

ROWS, RECORDED, RECORDINGS = 64, 8, 9
SIZES = (4, 8, 16)
GOAL = 0.05
ONE, TWO = ("gpipe", "1f1b", "zb-h1"), ("interleaved-1f1b", "zb-v")  # stages a rank


def stages_of(family: str, width: int) -> list[nn.Module]:
    """Eight layers in all, as even stages; each ends without a loss of weight for the last one."""
    count = 2 if family in ONE else 4
    return [
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8 // count)))
        for _ in range(count)
    ]


def pipeline(family: str, microbatches: int, width: int) -> tuple[penstock.Pipeline, Tensor]:
    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        stages_of(family, width), microbatches=microbatches, schedule=family, loss_fn=F.mse_loss, timeout=60
    )
    return pipe, torch.randn(ROWS * microbatches, width)


def recording(pipe: penstock.Pipeline, x: Tensor, times: int) -> Timeline:
    """Of several recordings, the one of median makespan."""
    found = []
    for _ in range(times):
        with pipe.record() as timeline:
            pipe.step(x, target=x)
            pipe.zero_grad()
            pipe.step(x, target=x)
            pipe.zero_grad()
        found.append(timeline)
    return sorted(found, key=lambda timeline: timeline.makespan)[len(found) // 2]


def predicted(run: Timeline, family: str, microbatches: int) -> float:
    """Makespan under the run's costs, and what the run spent outside of its own."""
    schedule = build(family, run.ranks, microbatches, run.schedule.placement.stages_per_rank)
    outside = account(run).whole - run.makespan
    return simulate(schedule, Costs.from_timeline(run)).makespan + outside


def step(pipe: penstock.Pipeline, x: Tensor) -> Any:
    def work() -> None:
        pipe.step(x, target=x)
        pipe.zero_grad()

    return work


def measure(rank: int, settings: Namespace) -> None:
    columns = [("from", 17), ("for", 17), ("microbatches", 12), ("predicted ms", 12), ("measured ms", 12), ("error", 8)]
    title = f"8 Linear({settings.width}) with Tanh, {ROWS} rows a microbatch, 2 gloo ranks, recorded with {RECORDED} microbatches"
    table = Table(rank, title, columns)
    errors: list[float] = []
    wanted = [name for name in (*ONE, *TWO) if name in settings.schedules]
    for group in (ONE, TWO):
        names = [name for name in wanted if name in group]
        if not names:
            continue
        pipes = {(name, count): pipeline(name, count, settings.width) for name in names for count in SIZES}
        for pipe, x in pipes.values():
            step(pipe, x)()
        runs = {name: recording(*pipes[name, RECORDED], 3 if settings.quick else RECORDINGS) for name in names}
        times = interleave({f"{name} {count}": step(*pipes[name, count]) for name, count in pipes}, settings.rounds)
        for source in names:
            for name, count in pipes:
                if name == source or (source == names[0] and count == RECORDED):
                    told, real = predicted(runs[source], name, count), times.median(f"{name} {count}")
                    error = told / real - 1
                    errors.append(abs(error))
                    table.row([source, name, count, f"{told * 1e3:.2f}", f"{real * 1e3:.2f}", f"{100 * error:+.1f} %"])
        for pipe, _ in pipes.values():
            pipe.close()
    if rank == 0:
        met = sum(error <= GOAL for error in errors)
        print(f"\nerror: median {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %; "
              f"{met} of {len(errors)} within {100 * GOAL:.0f} %")  # fmt: skip


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--width", type=int, default=512, help="of the layers (default 512)")
        parser.set_defaults(schedules=",".join((*ONE, *TWO)))

    run_ranks(measure, 2, options(__doc__, 15, more))


if __name__ == "__main__":
    main()
