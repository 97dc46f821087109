"""How well a recorded run predicts others: step times predicted from one recording against measured ones.

    penstock bench calibration [--quick] [--json] [--rounds 15] [--schedules gpipe,1f1b,...] [--width 512]

Two gloo processes with balanced stages, one thread each. In every round each schedule is recorded once with 8
microbatches, as for `penstock whatif`, and measured without recording with 4, 8 and 16. From the round's recording the
step times of that round are predicted: makespan, and what the recording spent outside of it. The first schedule's
recording also predicts the other schedules. Shown are medians over the rounds; the error is the median of the rounds'
(predicted - measured) / measured. The goal is at most 5 % on balanced compute.

Two kinds of stage: `compute` multiplies matrices, so other work on the machine disturbs recording and measurement
apart from each other; `nap` sleeps in forward and backward instead, which leaves what the prediction itself gets wrong.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from common import Step, interleave, run_ranks
from report import Column, Goal, add_names, at_least_one, bench
from torch import Tensor, nn

import penstock
from penstock.schedule import Costs, Timeline, build, simulate
from penstock.tools.search.calibrate import outside

ROWS, RECORDED = 64, 8
SIZES = (4, 8, 16)
GOAL = 5.0  # %
KINDS = ("nap", "compute")
WARM_UP = 2
NAP = 0.002  # seconds of one layer's forward; its backward takes twice that
ONE, TWO = ("gpipe", "1f1b", "zb-h1"), ("interleaved-1f1b", "zb-v")  # stages per rank


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * NAP)
        return gradient


class Nap(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x) * self.weight


def stages_of(kind: str, family: str, width: int) -> list[nn.Module]:
    """Eight layers in all, as even stages."""
    count = 2 if family in ONE else 4

    def layer() -> nn.Module:
        return Nap(width) if kind == "nap" else nn.Sequential(nn.Linear(width, width), nn.Tanh())

    return [nn.Sequential(*(layer() for _ in range(8 // count))) for _ in range(count)]


class Contest:
    """The schedules of one number of stages per rank: recorded, measured, predicted."""

    def __init__(self, kind: str, names: list[str], width: int) -> None:
        self.names = names
        self.recordings: dict[str, list[Timeline]] = {name: [] for name in names}
        self.pipes: dict[tuple[str, int], penstock.Pipeline] = {}
        self.steps: dict[str, Step] = {}
        x = torch.randn(ROWS * max(SIZES), 8 if kind == "nap" else width)
        for name in names:
            for count in SIZES:
                stages = stages_of(kind, name, x.shape[1])
                pipe = penstock.Pipeline(stages, microbatches=count, schedule=name, loss_fn=F.mse_loss, timeout=60)
                self.pipes[name, count] = pipe
                self.steps[f"{name} {count}"] = self.step(pipe, x[: ROWS * count])
            self.steps[f"{name} recorded"] = self.recording(name, x[: ROWS * RECORDED])

    def step(self, pipe: penstock.Pipeline, x: Tensor) -> Step:
        def work() -> None:
            pipe.step(x, target=x)
            pipe.zero_grad()

        return work

    def recording(self, name: str, x: Tensor) -> Step:
        pipe = self.pipes[name, RECORDED]

        def work() -> None:
            with pipe.record() as timeline:
                pipe.step(x, target=x)
            pipe.zero_grad()
            self.recordings[name].append(timeline)

        return work

    def rows(self, rounds: int) -> list[tuple[str, str, int, float, float, float]]:
        """(from, for, microbatches, predicted, measured, error) of every prediction."""
        times = interleave(self.steps, rounds, WARM_UP)
        found = []
        for source in self.names:
            for name, count in self.pipes:
                if name == source or (source == self.names[0] and count == RECORDED):
                    told = [predicted(run, name, count) for run in self.recordings[source][WARM_UP:]]
                    real = times.seconds[f"{name} {count}"]
                    errors = [one / two - 1 for one, two in zip(told, real, strict=True)]
                    figures = map(statistics.median, (told, real, errors))
                    found.append((source, name, count, *figures))
        return found

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()


def predicted(run: Timeline, family: str, microbatches: int) -> float:
    """Makespan under the run's costs, and what the run spent outside of its own."""
    schedule = build(family, run.ranks, microbatches, run.schedule.placement.stages_per_rank)
    return simulate(schedule, Costs.from_timeline(run)).makespan + outside(run)


def measure(rank: int, kind: str, settings: Namespace) -> None:
    what = f"sleeps of {NAP * 1e3:g} ms" if kind == "nap" else f"Linear({settings.width}, {settings.width}) and Tanh"
    title = f"{kind}: 8 layers of {what}, {ROWS} rows a microbatch, 2 gloo ranks, recorded with {RECORDED} microbatches"
    columns = [Column("from", 17), Column("for", 17), Column("microbatches", 12)]
    columns += [Column(f"{what} ms", 12, "{:.2f}") for what in ("predicted", "measured")]
    columns += [Column("error %", 8, "{:+.1f}"), Column("size of error", 21)]
    table = settings.report.table(rank, title, columns)
    errors: list[float] = []
    for group in (ONE, TWO):
        names = [name for name in group if name in settings.schedules]
        if not names:
            continue
        torch.manual_seed(0)
        contest = Contest(kind, names, settings.width)
        for source, name, count, told, real, error in contest.rows(settings.rounds):
            errors.append(abs(100 * error))
            table.row(source, name, count, told * 1e3, real * 1e3, 100 * error, Goal(errors[-1], GOAL))
        contest.close()
    columns = [Column("kind", 17), Column("predictions"), Column(f"within {GOAL:g} %"), Column("median %")]
    table = settings.report.table(rank, f"{kind}: how large the errors are", [*columns, Column("largest %")])
    table.row(kind, len(errors), sum(error <= GOAL for error in errors), statistics.median(errors), max(errors))


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--width", type=at_least_one, default=512, help="of the layers that compute (default 512)")
        add_names(parser, "--kinds", KINDS)

    with bench(__doc__, 15, (*ONE, *TWO), more=more) as settings:
        for kind in settings.kinds:
            run_ranks(measure, 2, kind, settings)


if __name__ == "__main__":
    main()
