"""How fast steps are where compute, or messages, are what costs: against torch.distributed.pipelining and one process.

    penstock bench throughput [--quick] [--json] [--rounds 7] [--schedules gpipe,1f1b] [--parts model,overlap]
                              [--overlapping zb-h2] [--clips no]

Two gloo processes with one thread each.

model     8 transformer blocks (width 384, 128 tokens, batch 16, in 8 and in 16 microbatches) against
          torch.distributed.pipelining, and against one process with one thread and the same microbatches:

              of ideal    one process / (2 * (1 - idle share of the schedule)) / ours
              of halves   the same, but from two processes that each run half of the model at the same time and
                          never speak: what this machine gives when both of its cores are busy

messages  stages of little compute and messages of 1 and 2 MiB: against torch, and against the schedule's own compute
          (a rank's computes without messages / (1 - idle share)) + raw gloo moving the same messages both ways;
          ours as it comes (shared memory on one host), and held to gloo. Through shared memory the messages
          should cost next to nothing: `of compute` is the time against the schedule's own compute alone
threads   ranks as threads of one process against ranks as processes
overlap   20 steps of the model with AdamW: `train_steps`, where steps overlap, against a loop of `step`, without
          clipping and with it (it never bites). `predicted` is what the simulator makes of a recorded step, the median
          of one per round: 20 times makespan and update against one makespan and 19 periods; `of gain` is the share of
          that gain that there was (1 where none is predicted). One pipeline runs both, so that both compute in the
          same memory. `as busy` is the prediction times `busy`: where ranks overlap, both cores compute all the time,
          and what they share (memory, caches) may make the same work take longer; so does whatever else is on the
          machine in that round. Few microbatches, 4, so that there is something to gain. One schedule
          (`--overlapping`) and one of `--clips` take about 80 s per round on two cores that do 50 GFLOP/s each

The idle share is the simulator's, for forward, input and weight gradients of equal cost. `busy` is the ratio of
processor time (see `common.Times`).
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    SEVERAL,
    THEIRS,
    WAYS,
    Block,
    Step,
    Times,
    interleave,
    only,
    run_ranks,
    torch_pipeline,
    without_ours,
)
from report import Column, Goal, add_names, bench
from torch import Tensor, nn

import penstock
from penstock.schedule import Costs, Op, simulate, steady_state
from penstock.tools.search.calibrate import costs_of

AHEAD = 4  # messages that the raw loop keeps under way
CLIPS = {"no": None, "yes": 1e9}  # a limit that never bites


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def accumulate(model: nn.Module, x: Tensor, y: Tensor, count: int) -> None:
    """Plain gradient accumulation."""
    seed = torch.tensor(1 / count)
    for x_part, y_part in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        torch.autograd.backward(mean_loss(model(x_part), y_part), seed)


def ratio(times: Times, name: str, allowed: Callable[[dict[str, float]], float]) -> float:
    """Median over the rounds of a contestant against what the others of its round allow."""
    rounds = [dict(zip(times.seconds, row, strict=True)) for row in zip(*times.seconds.values(), strict=True)]
    return statistics.median(row[name] / allowed(row) for row in rounds)


def idle_share(pipe: penstock.Pipeline) -> float:
    return simulate(pipe.schedule, Costs()).bubble


# -- a model


def blocks(family: str, quick: bool, width: int) -> list[nn.Module]:
    """The model in as many stages as the schedule has."""
    stages = 4 if family in SEVERAL else 2
    each = 1 if quick else 8 // stages
    return [nn.Sequential(*[Block(width, 6) for _ in range(each)]) for _ in range(stages)]


def measure_model(rank: int, settings: Namespace) -> None:
    quick = settings.quick
    width, tokens, batch = (48, 16, 16) if quick else (384, 128, 16)
    columns = [Column("schedule", 17), Column("microbatches", 12)]
    columns += [Column("ours/torch", 21), Column("ours/torch, busy", 4, "{:.2f}", "busy")]
    columns += [Column("of ideal", 21), Column("of halves", 9, "{:.2f}")]
    title = f"transformer blocks, width {width}, {tokens} tokens, batch {batch}"
    table = settings.report.table(rank, title, columns)
    for count in (8,) if quick else (8, 16):
        for family in settings.schedules:
            torch.manual_seed(0)
            x, y = torch.randn(2, batch, tokens, width).unbind()
            own, other = blocks(family, quick, width), blocks(family, quick, width)
            whole = nn.Sequential(*blocks(family, quick, width))
            half = nn.Sequential(*whole[: len(whole) // 2])
            pipe = penstock.Pipeline(own, microbatches=count, schedule=family, loss_fn=mean_loss)
            steps: dict[str, Step] = {
                "ours": lambda pipe=pipe, x=x, y=y: pipe.step(x, target=y),
                "torch": torch_pipeline(family, rank, other, count, mean_loss, x, y),
                "one": only(rank, 0, lambda whole=whole, x=x, y=y, count=count: accumulate(whole, x, y, count)),
                "halves": lambda half=half, x=x, y=y, count=count: accumulate(half, x, y, count),
            }
            times = interleave(steps, settings.rounds, warm_up=1)
            share = 1 - idle_share(pipe)
            pipe.close()
            table.row(
                family,
                count,
                Goal(times.ratio("ours", "torch"), 1.0),
                times.busy_ratio("ours", "torch"),
                Goal(times.ratio("one", "ours") / 2 / share, 0.97, at_least=True),
                times.ratio("halves", "ours") / share,
            )


# -- messages


class Scale(nn.Module):
    """Little compute for its bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


def raw_messages(sends: int, receives: int, shape: tuple[int, ...], peer: int) -> None:
    """Bare gloo moving the messages of a step, both ways at once."""
    value = torch.zeros(shape)
    works: deque[Any] = deque()
    for number in range(max(sends, receives)):
        if number < receives:
            buffer = torch.empty(shape)
            works.append((dist.irecv(buffer, peer), buffer))
        if number < sends:
            works.append((dist.isend(value, peer), value))
        while len(works) > 2 * AHEAD:
            works.popleft()[0].wait()
    while works:
        works.popleft()[0].wait()


def computes_only(stages: list[nn.Module], x: Tensor, y: Tensor, count: int, last: bool) -> None:
    """The computes of one rank on values that are there, with the loss where it has that: no message, no idle time."""
    seed = torch.tensor(1 / count)
    for x_part, y_part in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        for number, stage in enumerate(stages, 1):
            arrived = x_part.detach().requires_grad_()
            output = stage(arrived)
            if last and number == len(stages):
                torch.autograd.backward(mean_loss(output, y_part), seed)
            else:
                torch.autograd.backward(output, x_part)


def scales(stages: int, width: int) -> list[nn.Module]:
    return [Scale(width) for _ in range(stages)]


def measure_messages(rank: int, settings: Namespace) -> None:
    count, width = (4, 256) if settings.quick else (16, 4096)
    columns = [Column("schedule", 17), Column("MiB", 5, "{:.2g}"), Column("who", 10)]
    columns += [Column("it/torch", 21), Column("it/torch, busy", 4, "{:.2f}", "busy")]
    columns += [Column("of compute", 21, "{:.2f}"), Column("of compute, busy", 4, "{:.2f}", "busy")]
    columns += [Column("of compute + messages", 21)]
    table = settings.report.table(rank, f"large messages, little compute, {count} microbatches", columns)
    for rows in (64,) if settings.quick else (64, 128):
        for family in settings.schedules:
            torch.manual_seed(0)
            stages = 4 if family in SEVERAL else 2
            x, y = torch.randn(2, rows * count, width).unbind()
            sent = {"microbatches": count, "schedule": family, "loss_fn": mean_loss}
            pipes = {who: penstock.Pipeline(scales(stages, width), **sent, transport=way) for who, way in WAYS.items()}
            row = [action.op for action in pipes["ours"].program.rows[rank] if action is not None]
            sends = sum(op in (Op.SEND_F, Op.SEND_B) for op in row)
            receives = sum(op in (Op.RECV_F, Op.RECV_B) for op in row)
            mine, last = scales(stages // 2, width), pipes["ours"].schedule.placement.rank_of(stages - 1) == rank
            steps: dict[str, Step] = {
                **{who: lambda pipe=pipe, x=x, y=y: pipe.step(x, target=y) for who, pipe in pipes.items()},
                "torch": torch_pipeline(family, rank, scales(stages, width), count, mean_loss, x, y),
                "compute": lambda mine=mine, x=x, y=y, last=last: computes_only(mine, x, y, count, last),
                "messages": without_ours(
                    lambda n=(sends, receives), shape=(rows, width): raw_messages(*n, shape, 1 - rank)
                ),
            }
            times = interleave(steps, settings.rounds)
            share = 1 - idle_share(pipes["ours"])
            for who, pipe in pipes.items():
                pipe.close()
                allowed = ratio(times, who, lambda row, share=share: row["compute"] / share + row["messages"])
                alone = ratio(times, who, lambda row, share=share: row["compute"] / share)
                goal = Goal(alone, 1.1) if WAYS[who] is None else alone
                busy, work = (times.busy_ratio(who, other) for other in ("torch", "compute"))
                against = Goal(times.ratio(who, "torch"), 1.0)
                table.row(family, rows * width * 4 / 2**20, who, against, busy, goal, work, Goal(allowed, 1.15))


# -- threads


def measure_threads(rank: int, settings: Namespace) -> None:
    quick = settings.quick
    width, tokens, batch, count = (48, 16, 16, 8) if quick else (384, 128, 16, 8)
    columns = [Column("schedule", 17), Column("threads/processes", 17, "{:.2f}")]
    table = settings.report.table(rank, "ranks as threads of one process, beside ranks as processes (no goal)", columns)
    for family in settings.schedules[:2] if quick else settings.schedules:
        torch.manual_seed(0)
        x, y = torch.randn(2, batch, tokens, width).unbind()
        common = {"microbatches": count, "schedule": family, "loss_fn": mean_loss}
        processes = penstock.Pipeline(blocks(family, quick, width), **common)
        threads = penstock.Pipeline(blocks(family, quick, width), **common, transport="threads", ranks=2)
        steps: dict[str, Step] = {
            "processes": lambda processes=processes, x=x, y=y: processes.step(x, target=y),
            "threads": only(rank, 0, lambda threads=threads, x=x, y=y: threads.step(x, target=y)),
        }
        times = interleave(steps, settings.rounds, warm_up=1)
        processes.close()
        threads.close()
        table.row(family, times.ratio("threads", "processes"))


# -- steps that overlap


def measure_overlap(rank: int, settings: Namespace) -> None:
    quick = settings.quick
    width, tokens, batch, count, length = (48, 16, 16, 4, 4) if quick else (384, 128, 16, 4, 20)
    columns = [Column("schedule", 17), Column("clip", 5), Column("overlapped/together", 19)]
    columns += [Column("overlapped/together, busy", 4, "{:.2f}", "busy")]
    columns += [Column("predicted", 9, "{:.3f}"), Column("as busy", 9, "{:.3f}"), Column("of gain", 9, "{:.2f}")]
    title = f"{length} steps that overlap, transformer blocks, width {width}, {tokens} tokens, batch {batch}"
    table = settings.report.table(rank, title, columns)
    for family in settings.overlapping[-1:] if quick else settings.overlapping:
        for clip in [CLIPS[name] for name in settings.clips]:
            torch.manual_seed(0)
            x, y = torch.randn(2, batch, tokens, width).unbind()
            common = {"microbatches": count, "schedule": family, "loss_fn": mean_loss}
            pipe = penstock.Pipeline(blocks(family, quick, width), **common)
            adam = torch.optim.AdamW(pipe.parameters(), lr=1e-5)
            train_together(pipe, adam, x, y, clip, 2)
            deque(pipe.train_steps([(x, y)] * 2, adam, clip=clip), 0)
            predictions: list[float] = []
            steps: dict[str, Step] = {
                "together": lambda p=pipe, o=adam, x=x, y=y, c=clip: train_together(p, o, x, y, c, length),
                "overlapped": lambda p=pipe, o=adam, x=x, y=y, c=clip: deque(
                    p.train_steps([(x, y)] * length, o, clip=c), 0
                ),
                "recorded": lambda p=pipe, o=adam, x=x, y=y, found=predictions: found.append(
                    predicted(p, o, x, y, length)
                ),
            }
            times = interleave(steps, settings.rounds, warm_up=0)
            expected = statistics.median(predictions)
            pipe.close()
            found, busy = times.ratio("overlapped", "together"), times.busy_ratio("overlapped", "together")
            share = (1 - found) / (1 - expected) if expected < 0.999 else 1.0
            table.row(
                family,
                "no" if clip is None else "yes",
                Goal(found, 1.0),
                busy,
                expected,
                expected * busy,
                share if quick else Goal(share, 0.8, at_least=True),
            )


def train_together(
    pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, clip: float | None, steps: int
) -> None:
    """The loop that ends every step on all ranks together."""
    for _ in range(steps):
        pipe.step(x, target=y)
        if clip is not None:
            pipe.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()


def predicted(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> float:
    """Overlapped against together, as the simulator has it from a recorded step."""
    with pipe.record() as timeline:
        train_together(pipe, optimizer, x, y, None, 3)
    costs, update = costs_of(timeline), max(wall.optimizer for wall in timeline.walls)
    together = simulate(pipe.schedule, costs).makespan
    period = steady_state(pipe.schedule, costs, update=update).period
    return (together + update + (steps - 1) * period) / (steps * (together + update))


PARTS = {"model": measure_model, "messages": measure_messages, "threads": measure_threads, "overlap": measure_overlap}


def measure(rank: int, settings: Namespace) -> None:
    for name in settings.parts:
        PARTS[name](rank, settings)


def main() -> None:
    def more(parser: Any) -> None:
        add_names(parser, "--parts", tuple(PARTS))
        add_names(parser, "--overlapping", ("zb-h2", "zb-v"))
        add_names(parser, "--clips", tuple(CLIPS))

    with bench(__doc__, 7, tuple(THEIRS), more=more) as settings:
        run_ranks(measure, 2, settings)


if __name__ == "__main__":
    main()
