"""How well plans are predicted: steps measured on two processes beside what `penstock plan --here` says of them.

    penstock bench plan [--quick] [--json] [--rounds 5] [--schedules 1f1b,...] [--widths 128,256] [--rows 2,4]

For each width of a small GPT, and each number of rows per microbatch, the settings are measured as the planner measures
them, before and after the steps that they are to predict. In between, every schedule with 4, 8 and 16 microbatches is
run: steps of all of them in turn, from a barrier to the last rank's end, with clipping and the optimizer. Shown are the
predicted and the measured median of each, the peak of live tensors, predicted and counted by torch's profiler, and for
each batch how far the chosen plan is from the best. What the machine itself adds is shown beside: the medians of every
other round against those of the rest.

Goals: step time within 5 % in the median and 10 % at the 90th percentile; memory within 10 %; the chosen plan within
5 % of the best in 90 % of cases. Two ranks compute on two cores here: run it on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import run_ranks
from report import Column, Goal, add_names, bench
from torch.profiler import ProfilerActivity, profile

from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.here import MeasuredPricing, MeasuredSetting, TimedPipeline, settings_of
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.ranking import SearchSpace, candidates
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batches import open_data
from penstock.train.run.memory import Memory

ONE, TWO = ("1f1b", "gpipe", "zb-h1", "zb-h2"), ("interleaved-1f1b", "interleaved-zb", "zb-v")
COUNTS = (4, 8, 16)  # microbatches
RANKS, LAYERS, SEQUENCE = 2, 8, 64
WARM_UP, STEPS = 1, 2  # rounds, and steps of a turn


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

    def timed(self) -> float:
        """The seconds of a step; caches are warm, as within a run."""
        self.train()
        return statistics.median(self.seconds() for _ in range(STEPS))

    def peak(self) -> float:
        """The most bytes of tensors at any moment of a step: weights and what the optimizer keeps, and what comes."""
        self.train()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.call()
        now = most = 0
        for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        self.pipe.zero_grad()
        kept = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return float(most + sum(each.numel() * each.element_size() for each in (*self.pipe.parameters(), *kept)))


def run_all(rank: int, config: TrainConfig, ways: list[Any], rounds: int, path: str) -> None:
    """Measure what the planner measures and every way, in turn; rank 0 writes costs, seconds and bytes."""
    batch = open_data(config).first()
    with ExitStack() as stack:
        settings = {setting.key: TimedPipeline(config, setting, batch, stack) for setting in settings_of(ways)}
        runs = [Contestant(config, way, batch, stack) for way in ways]
        costs: list[list[Any]] = []
        times: list[list[float]] = []
        turns: dict[Any, list[Any]] = {key: [] for key in settings}
        for number in range(WARM_UP + rounds):
            first = number * len(runs) // (WARM_UP + rounds)
            costs.append([None] * len(runs))
            times.append([0.0] * len(runs))
            for place in (*range(first, len(runs)), *range(first)):
                run, key = runs[place], runs[place].setting.key
                turn = settings[key].turn()
                turns[key].append(turn)
                costs[-1][place] = {key: settings[key].measured([turn])}
                times[-1][place] = run.timed()
        usual = {key: run.measured(turns[key][WARM_UP:]) for key, run in settings.items()}
        peaks = torch.tensor([run.peak() for run in runs], dtype=torch.float64)
    gathered = [torch.zeros_like(peaks) for _ in range(RANKS)]
    dist.all_gather(gathered, peaks)
    if rank == 0:
        torch.save((usual, costs[WARM_UP:], times[WARM_UP:], torch.stack(gathered).T.tolist()), path)


def measure_all(config: TrainConfig, ways: list[PlanCandidate], rounds: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "measured")
        run_ranks(run_all, RANKS, config, ways, rounds, path)
        return torch.load(path, weights_only=False)


def seconds_of(way: PlanCandidate, found: list[PlanCandidate]) -> float:
    """The price of a way among those of which costs are known."""
    same = (each for each in found if (each.family, each.microbatches) == (way.family, way.microbatches))
    return next(same).seconds


def tensors(memory: Memory) -> float:
    """Bytes of tensors that a plan counts on a rank."""
    return memory.weights + memory.gradients + memory.optimizer + (memory.activations or 0.0)


def medians(rounds: list[list[float]]) -> list[float]:
    """Of each way; rounds in which the machine was slow count as if it had not been."""
    usual = statistics.median(map(sum, rounds))
    even = [[each * usual / sum(row) for each in row] for row in rounds]
    return [statistics.median(each) for each in zip(*even, strict=True)]


def main() -> None:
    def more(parser: Any) -> None:
        add_names(parser, "--widths", ("128", "256"))
        add_names(parser, "--rows", ("2", "4"))

    with bench(__doc__, 5, (*ONE, *TWO), more=more) as settings:
        compare(settings)


def compare(settings: Namespace) -> None:
    columns = [Column("width"), Column("rows"), Column("schedule", 17), Column("microbatches", 12)]
    columns += [Column(f"{what} ms", 12, "{:.2f}") for what in ("predicted", "measured")] + [
        Column("error %", 8, "{:+.1f}")
    ]
    columns += [Column("memory error %", 14, "{:+.1f}")]
    table = settings.report.table(0, "steps, predicted and measured", columns)
    errors: list[float] = []
    memory: list[float] = []
    regrets: list[float] = []
    noise: list[float] = []
    for width in map(int, settings.widths):
        for rows in map(int, settings.rows):
            config = config_of(width, rows * max(COUNTS))
            names = list(settings.schedules)
            ways = priced(config, names, rows, {})
            usual, costs, times, peaks = measure_all(config, ways, settings.rounds)
            plans = [way.seconds for way in priced(config, names, rows, usual)]
            real = medians(times)
            noise += (abs(a / b - 1) for a, b in zip(medians(times[::2]), medians(times[1::2]), strict=True))
            off = []
            for place in range(len(ways)):  # beside a turn of its setting: the machine's speed drifts
                told = [seconds_of(ways[place], priced(config, names, rows, row[place])) for row in costs]
                off.append(statistics.median(a / row[place] for a, row in zip(told, times, strict=True)) - 1)
            errors += map(abs, off)
            for way, one, two, error, held in zip(ways, plans, real, off, peaks, strict=True):
                wrong = [tensors(counted) / seen - 1 for counted, seen in zip(way.memory, held, strict=True)]
                memory += map(abs, wrong)
                shown = one * 1e3, two * 1e3, 100 * error, 100 * max(wrong, key=abs)
                table.row(width, rows, way.family, way.microbatches, *shown)
            for count in COUNTS:
                same = [place for place, way in enumerate(ways) if way.microbatches == count]
                chosen = min(same, key=lambda place: plans[place])
                regrets.append(real[chosen] / min(real[place] for place in same) - 1)
    summary = [Column("what", 40), Column("value", 10, "{:.1f}"), Column("goal", 21)]
    table = settings.report.table(0, "in all", summary)
    ordered = sorted(errors)
    within = 100 * sum(each <= 0.05 for each in regrets) / len(regrets)
    table.row("step time, median error %", 100 * statistics.median(errors), Goal(100 * statistics.median(errors), 5.0))
    tenth = 100 * ordered[int(0.9 * (len(ordered) - 1))]
    table.row("step time, 90th percentile %", tenth, Goal(tenth, 10.0))
    table.row("measured twice, median difference %", 100 * statistics.median(noise), None)
    table.row("measured twice, 90th percentile %", 100 * sorted(noise)[int(0.9 * (len(noise) - 1))], None)
    table.row("memory, median error %", 100 * statistics.median(memory), Goal(100 * statistics.median(memory), 10.0))
    fullest = 100 * sorted(memory)[int(0.9 * (len(memory) - 1))]
    table.row("memory, 90th percentile %", fullest, Goal(fullest, 10.0))
    table.row("choices not within 5 % of the best, %", 100 - within, Goal(100 - within, 10.0))


if __name__ == "__main__":
    main()
