"""How well plans are predicted: steps measured on two processes beside what `penstock plan --here` says of them.

    penstock bench plan [--quick] [--json] [--rounds 7] [--schedules 1f1b,...] [--widths 64,128] [--rows 2]

For each width of a small GPT, and each number of rows per microbatch, every schedule is run with 4, 8 and 16
microbatches, and the settings that `--here` measures are measured as it does. All take turns, in another order in every
round: a step from a barrier to the last rank's end, with clipping and the optimizer. The prediction is made of as many
turns of its setting as there are rounds. Shown are the predicted and the measured median of each, the peak of live
tensors, predicted and counted, and how far chosen plans are from the best: for each number of microbatches among all
schedules, and among those with as many stages per rank. What the machine itself adds is shown beside: the medians of
every other round against those of the rest.

Goals: step time within 5 % in the median and 10 % at the 90th percentile; memory within 10 %; the chosen plan within
5 % of the best in 90 % of cases. Two ranks compute on two cores here: run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import run_ranks
from report import Column, Goal, add_names, bench

from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.here import ROUNDS, MeasuredPricing, MeasuredSetting, TimedPipeline, settings_of
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.ranking import SearchSpace, candidates
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.run.allocations import bytes_of, counted_step

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb", "zb-v")
COUNTS = (4, 8, 16)  # microbatches
RANKS, LAYERS, SEQUENCE = 2, 8, 64
WARM_UP = 1  # rounds


def config_of(width: int, batch: int) -> TrainConfig:
    options = {"layers": LAYERS, "width": width, "heads": 4}
    config = config_for("gpt", batch=batch, sequence=SEQUENCE, options=options)
    return replace(config, pipeline=replace(config.pipeline, ranks=RANKS))


def priced(config: TrainConfig, names: list[str], rows: int, known: Any) -> list[PlanCandidate]:
    """Every schedule and number of microbatches, priced by measured costs."""
    cluster = Cluster(hosts=1, devices=RANKS)
    found = profile_config(config, cluster.software)
    ways: list[PlanCandidate] = []
    for count in COUNTS:
        space = SearchSpace(rows * count, 2.0, names, (False,), (rows,), (1, 2))
        pricing = lambda where, size: MeasuredPricing(found, cluster, where, size, known)  # noqa: E731
        ways += candidates(MeshLayout(RANKS), pricing, space)
    return ways


class Contestant(TimedPipeline):
    """One schedule with its own number of microbatches, open."""

    def __init__(self, config: TrainConfig, candidate: PlanCandidate, batch: Any, stack: ExitStack) -> None:
        setting = MeasuredSetting.of(candidate)
        super().__init__(config, setting, batch, stack, candidate.family, candidate.microbatches)

    def turn(self) -> Any:
        """The seconds of a step; caches are warm, as within a run."""
        self.train()
        return self.seconds()

    def peak(self) -> float:
        """The most bytes of tensors at any moment of a step."""
        with counted_step(self.pipe) as found:
            self.call()
        kept = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return found.with_gradients + bytes_of([*self.pipe.parameters(), *kept])


def run_all(rank: int, config: TrainConfig, ways: list[Any], rounds: int, path: str) -> None:
    """Measure what the planner measures, and every way, in turn; rank 0 writes costs, seconds and bytes."""
    batch = open_data(config).first()
    with ExitStack() as stack:
        settings = [TimedPipeline(config, setting, batch, stack) for setting in settings_of(ways)]
        runs = [Contestant(config, way, batch, stack) for way in ways]
        turns: dict[TimedPipeline, list[Any]] = {run: [] for run in (*settings, *runs)}
        for number in range(WARM_UP + rounds):
            for run in random.Random(number).sample([*turns], len(turns)):
                turns[run].append(run.turn())
        known = {run.setting.key: run.measured(turns[run][WARM_UP:]) for run in settings}
        times = [turns[run][WARM_UP:] for run in runs]
        peaks = torch.tensor([run.peak() for run in runs], dtype=torch.float64)
    gathered = [torch.zeros_like(peaks) for _ in range(RANKS)]
    dist.all_gather(gathered, peaks)
    if rank == 0:
        torch.save((known, times, torch.stack(gathered).T.tolist()), path)


def measure_all(config: TrainConfig, ways: list[PlanCandidate], rounds: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "measured")
        run_ranks(run_all, RANKS, config, ways, rounds, path)
        return torch.load(path, weights_only=False)


def tenth(values: Sequence[float]) -> float:
    """The 90th percentile."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


def main() -> None:
    def more(parser: Any) -> None:
        add_names(parser, "--widths", ("64", "128", "256"), ("64", "128"))
        add_names(parser, "--rows", ("1", "2", "4"), ("2",))

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of the ranks: what torch says of counting memory
    with bench(__doc__, ROUNDS, SCHEDULES, more=more) as settings:
        compare(settings)


def compare(settings: Namespace) -> None:
    columns = [Column("width"), Column("rows"), Column("schedule", 17), Column("microbatches", 12)]
    columns += [Column(f"{what} ms", 12, "{:.2f}") for what in ("predicted", "measured")]
    columns += [Column("error %", 8, "{:+.1f}"), Column("memory error %", 14, "{:+.1f}")]
    table = settings.report.table(0, "steps, predicted and measured", columns)
    errors: list[float] = []
    memory: list[float] = []
    regrets: list[float] = []
    noise: list[float] = []
    for width, rows in product(map(int, settings.widths), map(int, settings.rows)):
        config = config_of(width, rows * max(COUNTS))
        names = list(settings.schedules)
        known, times, peaks = measure_all(config, priced(config, names, rows, {}), settings.rounds)
        ways = priced(config, names, rows, known)
        real = [statistics.median(each) for each in times]
        noise += (statistics.median(each[::2]) / statistics.median(each[1::2] or each) - 1 for each in times)
        for way, measured, held in zip(ways, real, peaks, strict=True):
            wrong = [(row.tensors or 0.0) / seen - 1 for row, seen in zip(way.memory, held, strict=True)]
            memory += wrong
            errors.append(way.seconds / measured - 1)
            shown = way.seconds * 1e3, measured * 1e3, 100 * errors[-1], 100 * max(wrong, key=abs)
            table.row(width, rows, way.family, way.microbatches, *shown)
        for count, kinds in product(COUNTS, ((1, 2), (1,), (2,))):  # stages per rank
            pairs = zip(ways, real, strict=True)
            among = [(a.seconds, b) for a, b in pairs if a.microbatches == count and a.stages_per_rank in kinds]
            if len(among) > 1:
                regrets.append(min(among)[1] / min(b for _, b in among) - 1)
    summarize(settings, errors, noise, memory, regrets)


def summarize(
    settings: Namespace, errors: list[float], noise: list[float], memory: list[float], regrets: list[float]
) -> None:
    """The figures with a goal, over all rows."""
    table = settings.report.table(0, "in all", [Column("what", 42), Column("value", 10, "{:.1f}"), Column("goal", 21)])

    def row(what: str, share: float, limit: float | None = None) -> None:
        table.row(what, 100 * share, None if limit is None else Goal(100 * share, limit))

    missed = sum(each > 0.05 for each in regrets) / len(regrets)
    row("step time, median error %", statistics.median(map(abs, errors)), 5.0)
    row("step time, 90th percentile %", tenth([*map(abs, errors)]), 10.0)
    row("step time, mean error with its sign %", statistics.fmean(errors))
    row("measured twice, median difference %", statistics.median(map(abs, noise)))
    row("measured twice, 90th percentile %", tenth([*map(abs, noise)]))
    row("memory, median error %", statistics.median(map(abs, memory)), 10.0)
    row("memory, largest error %", max(map(abs, memory)), 10.0)
    row("memory, most below what was needed %", max(0.0, -min(memory)))
    row(f"choices not within 5 % of the best, of {len(regrets)}, %", missed, 10.0)


if __name__ == "__main__":
    main()
