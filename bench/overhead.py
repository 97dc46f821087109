"""What an action costs beside its own compute: tiny stages, against a bare gloo loop and torch.distributed.pipelining.

    penstock bench overhead [--quick] [--json] [--rounds 15] [--schedules gpipe,1f1b] [--profile]

Stages of one Linear(8, 8), 64 microbatches of 4 rows. Two gloo processes run, in turn and in one run:

    bare    what a careful engineer writes by hand: isend, irecv posted one ahead, the schedule's order, no checks
    torch   torch.distributed.pipelining's class of the same schedule
    ours    penstock.Pipeline as it comes, which between processes of one host is through shared memory;
            and, in rows of their own, held to gloo as the others are

and one of them alone runs a plain loop of forward, loss and backward beside a pipeline of one rank (nothing is sent).
Times are a step's, divided by the computes of one rank; `busy` is the ratio of processor time (see `common.Times`).
`--profile` prints where the one-rank step spends its time.
"""

from __future__ import annotations

import cProfile
import pstats
from argparse import Namespace
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SEVERAL, THEIRS, WAYS, Step, Times, interleave, only, run_ranks, torch_pipeline, without_ours
from report import Column, Goal, bench
from torch import Tensor, nn

import penstock

WIDTH, ROWS = 8, 4
UNDER_WAY = 4  # sends that the bare loop does not wait for at once


class BareLoop:
    """gpipe or 1f1b of one stage a rank, on two ranks, by hand."""

    def __init__(self, rank: int, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self.rank, self.module, self.x, self.y = rank, module, x, y
        self.count = len(x) // ROWS
        self.peer = 1 - rank
        self.seed = torch.tensor(1 / self.count)
        self.outputs: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.sends: deque[Any] = deque()

    def run(self, warm_up: int) -> None:
        """`warm_up` forwards, then one backward and one forward in turn, then the backwards that are left."""
        self.xs, self.ys = self.x.split(ROWS), self.y.split(ROWS)
        self.total: Tensor | None = None
        self.posted = 0
        self.coming = self.post()
        for number in range(warm_up):
            self.forward(number)
        for number in range(self.count):
            self.backward(number)
            if number + warm_up < self.count:
                self.forward(number + warm_up)
        while self.sends:
            self.sends.popleft()[0].wait()

    def post(self) -> tuple[Any, Tensor] | None:
        if self.posted == self.count:
            return None
        self.posted += 1
        buffer = torch.empty(ROWS, WIDTH)
        return dist.irecv(buffer, self.peer), buffer

    def receive(self) -> Tensor:
        assert self.coming is not None
        work, buffer = self.coming
        self.coming = self.post()
        work.wait()
        return buffer

    def send(self, value: Tensor) -> None:
        self.sends.append((dist.isend(value, self.peer), value))
        if len(self.sends) > UNDER_WAY:
            self.sends.popleft()[0].wait()

    def forward(self, number: int) -> None:
        if self.rank == 0:
            output = self.outputs[number] = self.module(self.xs[number])
            self.send(output.detach())
        else:
            arrived = self.inputs[number] = self.receive().requires_grad_()
            loss = self.outputs[number] = F.mse_loss(self.module(arrived), self.ys[number])
            self.total = loss.detach() if self.total is None else self.total + loss.detach()

    def backward(self, number: int) -> None:
        if self.rank == 0:
            torch.autograd.backward(self.outputs.pop(number), self.receive())
        else:
            torch.autograd.backward(self.outputs.pop(number), self.seed)
            self.send(self.inputs.pop(number).grad)


def computes(pipe: penstock.Pipeline) -> int:
    """How many computes the first rank has in a step."""
    return sum(len(action.parts()) for action in pipe.schedule.rows[0] if action is not None)


def contestants(family: str, rank: int, count: int) -> tuple[dict[str, Step], list[penstock.Pipeline]]:
    """One step of each that can run this schedule on two ranks."""
    torch.manual_seed(0)
    stages = 4 if family in SEVERAL else 2
    x, y = torch.randn(2, count * ROWS, WIDTH).unbind()

    def make() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]

    pipes = [
        penstock.Pipeline(make(), microbatches=count, schedule=family, loss_fn=F.mse_loss, transport=way)
        for way in WAYS.values()
    ]
    steps: dict[str, Step] = {
        who: lambda pipe=pipe: pipe.step(x, target=y) for who, pipe in zip(WAYS, pipes, strict=True)
    }
    steps["torch"] = torch_pipeline(family, rank, make(), count, F.mse_loss, x, y)
    if family in ("gpipe", "1f1b"):
        bare = BareLoop(rank, make()[rank], x, y)
        warm_up = count if family == "gpipe" else 2 - rank
        steps["bare"] = without_ours(lambda: bare.run(warm_up))
    return steps, pipes


def measure_ranks(rank: int, settings: Namespace) -> None:
    count = 8 if settings.quick else 64
    title = f"Linear(8, 8), 2 gloo ranks, {count} microbatches: us a compute, and ratios"
    columns = [Column("schedule", 17), Column("who", 10)]
    columns += [Column(f"{who} us", 7, head=who) for who in ("bare", "torch", "it")]
    for other in ("bare", "torch"):
        columns += [Column(f"it/{other}", 21), Column(f"it/{other}, busy", 4, "{:.2f}", "busy")]
    table = settings.report.table(rank, title, columns)
    for family in settings.schedules:
        steps, pipes = contestants(family, rank, count)
        times = interleave(steps, settings.rounds)
        for pipe in pipes:
            pipe.close()
        for who in WAYS:
            table.row(*row(family, who, times, computes(pipes[0])))


def row(family: str, who: str, times: Times, actions: int) -> list[object]:
    bare = "bare" in times.seconds
    return [
        family,
        who,
        times.median("bare") / actions * 1e6 if bare else None,
        times.median("torch") / actions * 1e6,
        times.median(who) / actions * 1e6,
        Goal(times.ratio(who, "bare"), 1.15) if bare else None,
        times.busy_ratio(who, "bare") if bare else None,
        Goal(times.ratio(who, "torch"), 0.3 if WAYS[who] is None else 0.7 if bare else 0.5),
        times.busy_ratio(who, "torch"),
    ]


def measure_alone(rank: int, settings: Namespace) -> None:
    """One rank, nothing sent: what the executor adds to a plain loop."""
    count = 8 if settings.quick else 64
    torch.manual_seed(0)
    x, y = torch.randn(2, count * ROWS, WIDTH).unbind()
    xs, ys, seed = x.split(ROWS), y.split(ROWS), torch.tensor(1 / count)
    plain = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    columns = [Column("what", 17), Column("plain us", 7, head="plain"), Column("ours us", 7, head="ours")]
    columns += [Column("ours/plain", 10, "{:.2f}"), Column("ours/plain, busy", 4, "{:.2f}", "busy")]
    table = settings.report.table(rank, "one process, nothing sent: us a compute", columns)
    for name, stages, threads in (("one rank", 1, 1), ("one rank, split", 2, 1), ("two threads", 2, 2)):
        family = "zb-v" if "split" in name else "1f1b"
        modules = [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]
        pipe = penstock.Pipeline(
            modules, microbatches=count, schedule=family, ranks=threads, loss_fn=F.mse_loss, transport="threads"
        )

        def loop(stages: int = stages) -> None:
            for x_part, y_part in zip(xs, ys, strict=True):
                value = x_part
                for module in plain[:stages]:
                    value = module(value)
                torch.autograd.backward(F.mse_loss(value, y_part), seed)

        steps = {"plain": loop, "ours": lambda pipe=pipe: pipe.step(x, target=y)}
        times = interleave({who: only(rank, 0, step) for who, step in steps.items()}, settings.rounds)
        actions = computes(pipe)
        medians = [times.median(who) / actions * 1e6 for who in ("plain", "ours")]
        busy = times.busy_ratio("ours", "plain") if threads == 1 else None
        table.row(name, *medians, times.ratio("ours", "plain"), busy)
        if settings.profile and threads == 1 and rank == 0:
            profile(pipe, x, y)
        pipe.close()


def profile(pipe: penstock.Pipeline, x: Tensor, y: Tensor) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        pipe.step(x, target=y)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def measure(rank: int, settings: Namespace) -> None:
    measure_ranks(rank, settings)
    measure_alone(rank, settings)


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--profile", action="store_true", help="where a step of one rank spends its time")

    with bench(__doc__, 15, tuple(THEIRS), more=more) as settings:
        run_ranks(measure, 2, settings)


if __name__ == "__main__":
    main()
