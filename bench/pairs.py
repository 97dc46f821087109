"""How well overlapped pairs are priced: their time predicted from one recorded run against another run's.

    penstock bench pairs [--quick] [--json]

Four stages on two ranks (threads), dualpipe-v. A handler runs the two halves of a pair at the same time, on two
threads; stages sleep, so that both halves really run, on any machine. A run with 8 microbatches is recorded,
`Costs.from_timeline` measures what pairs take, and a run with 12 is predicted from it: every kind of pair, and the
makespan. The goal is at most 5 %. The last column has the halves' sum: what the pair would take if they ran one after
the other.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from report import Column, Goal, bench
from torch import Tensor, nn

import penstock
from penstock.schedule import Costs, Op, Timeline, build, simulate

GOAL = 5.0  # %
RANKS, STAGES, RECORDED, PREDICTED = 2, 4, 8, 12


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * context.seconds)
        return gradient, None


class Nap(nn.Module):
    """A layer that sleeps in its forward, and twice as long in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)


def recorded(microbatches: int, seconds: float) -> Timeline:
    """The second step of a pipeline whose pairs run their halves at the same time."""
    model = nn.Sequential(*(Nap(seconds) for _ in range(STAGES)))
    schedule = build("dualpipe-v", RANKS, microbatches)
    with ThreadPoolExecutor(RANKS) as helpers:

        def together(action: Any, context: Any) -> None:
            context.fetch(action)
            one, other = action.parts()
            helper = helpers.submit(context.compute, one)
            context.compute(other)
            helper.result()

        with penstock.Pipeline(
            model,
            stages=STAGES,
            ranks=RANKS,
            microbatches=microbatches,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        ) as pipe:
            for op in (Op.OVERLAP_F_B, Op.OVERLAP_B_F):
                pipe.register(op, together)
            x = torch.randn(microbatches, 4)
            pipe.step(x, target=x)
            with pipe.record() as timeline:
                pipe.step(x, target=x)
        return timeline


def main() -> None:
    """Record, predict, compare."""
    with bench(__doc__) as settings:
        seconds = 0.02 if settings.quick else 0.1
        costs, run = Costs.from_timeline(recorded(RECORDED, seconds)), recorded(PREDICTED, seconds)
        times = costs.by_op(STAGES)
        pairs: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for span in run.spans:
            if span.action.pair is not None:
                forward, backward = sorted(span.action.pair, key=lambda part: part.op is not Op.F)
                halves = times[forward.op][forward.stage] + times[backward.op][backward.stage]
                pairs[forward.stage, backward.stage].append((span.length, halves))
        columns = [Column("what", 24), *(Column(f"{name} ms", 12, "{:.1f}") for name in ("predicted", "measured"))]
        columns += [Column("error %", 14), Column("halves ms", 10, "{:.1f}")]
        table = settings.report.table(0, f"dualpipe-v, {RANKS} ranks, sleeps of {seconds * 1e3:g} ms", columns)
        for (ahead, back), found in sorted(pairs.items()):
            told, halves = costs.pair_share(ahead, back) * found[0][1], found[0][1]
            real = statistics.median(length for length, _ in found)
            error = Goal(100 * abs(told / real - 1), GOAL)
            table.row(f"pairs of stages {ahead}, {back}", told * 1e3, real * 1e3, error, halves * 1e3)
        told = simulate(run.schedule, costs).makespan
        error = Goal(100 * abs(told / run.makespan - 1), GOAL)
        table.row("makespan", told * 1e3, run.makespan * 1e3, error, None)


if __name__ == "__main__":
    main()
