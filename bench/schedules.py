"""How long it takes to build, lower, verify and simulate a schedule, beside the installed torch.

    penstock bench schedules            a few minutes: the goal's size, its halves, torch at smaller sizes
    penstock bench schedules --large    besides: 1,024 ranks x 4,096 microbatches x 2, in one round
    penstock bench schedules --quick    seconds: small sizes, one round; only shows that it runs

Every measurement is a process of its own, so that none inherits another's heap; the contestants
take turns, so that a busy machine slows both; the median of `--rounds` is reported. Times are
CPU seconds (`time.process_time`) of the call alone, without imports; memory is the peak resident
size of the process, for torch without what `import torch` itself takes.

What torch does in each column: build is `ScheduleInterleaved1F1B`'s order for all ranks, as its
constructor makes it; lower is `_add_send_recv`; verify is `_validate_schedule`, which looks at
the order of computes (ours also proves transfers and the absence of deadlock); simulate is
`_simulate_comms_compute`, which counts steps (ours gives times, memory and every span).
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from report import Column, Goal, Report, bench

PHASES = ("build", "lower", "verify", "simulate")
GOAL_GROWTH = 2.3


class Size(NamedTuple):
    """ranks x microbatches x stages per rank"""

    ranks: int
    microbatches: int
    stages_per_rank: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))

    @property
    def computes(self) -> int:
        """Forwards and backwards."""
        return 2 * self.ranks * self.microbatches * self.stages_per_rank


FULL, LARGE = Size(256, 1024, 2), Size(1024, 4096, 2)
GOALS = {FULL: (8.0, 0.5), LARGE: (90.0, 4.0)}  # seconds, GiB
HALVES = (Size(256, 512, 2), Size(128, 1024, 2))
BESIDE_TORCH = (Size(16, 64, 2), Size(32, 128, 2), Size(64, 256, 2))
QUICK = (Size(8, 32, 2), (Size(8, 16, 2), Size(4, 32, 2)), (Size(4, 8, 2), Size(8, 16, 2)))


# -- one measurement, in its own process


class Clock:
    """CPU seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = call()
        self.seconds[phase] = time.process_time() - begin
        return result


def peak_megabytes() -> float:
    """Peak resident size of this process so far; Linux counts in kilobytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_ours(size: Size, clock: Clock) -> int:
    """All four phases; how many actions the program has."""
    from penstock.schedule import build, lower, simulate, verify

    schedule = clock("build", lambda: build("interleaved-1f1b", *size))
    program = clock("lower", lambda: lower(schedule))
    clock("verify", lambda: verify(program))
    clock("simulate", lambda: simulate(schedule).makespan)
    return sum(program.columns.lengths)


def run_torch(size: Size, clock: Clock) -> int:
    """The same four phases by torch's own functions, which need no process group."""
    from torch.distributed.pipelining import schedules as theirs

    class Stage:  # what the constructor asks of a stage
        def __init__(self, index: int) -> None:
            self.stage_index, self.group_rank, self.group_size = index, 0, size.ranks
            self.num_stages, self.is_last = size.ranks * size.stages_per_rank, False

    class OrderAlone(theirs.ScheduleInterleaved1F1B):  # type: ignore[misc]
        def _prepare_schedule_with_comms(self, *args: Any, **kwargs: Any) -> None:  # lowered below, on its own
            pass

    stages: list[Any] = [Stage(index * size.ranks) for index in range(size.stages_per_rank)]
    total = size.ranks * size.stages_per_rank
    order = clock("build", lambda: OrderAlone(stages, size.microbatches).pipeline_order)
    computes = {rank: [action for action in row if action is not None] for rank, row in order.items()}

    def home(stage: int) -> int:
        return stage % size.ranks

    program = clock("lower", lambda: theirs._add_send_recv(computes, home, total))
    clock("verify", lambda: theirs._validate_schedule(order, size.ranks, total, size.microbatches))
    clock("simulate", lambda: theirs._simulate_comms_compute(program, home, total))
    return sum(map(len, program.values()))


def work(contestant: str, size: Size) -> None:
    """The process of one measurement: a line of JSON on stdout."""
    if contestant == "torch":
        importlib.import_module("torch.distributed.pipelining.schedules")  # so that its memory is not counted
    before = peak_megabytes() if contestant == "torch" else 0.0
    clock = Clock()
    lowered = {"ours": run_ours, "torch": run_torch}[contestant](size, clock)
    print(json.dumps({**clock.seconds, "megabytes": peak_megabytes() - before, "lowered": lowered}))


# -- many of them


def measure(contestant: str, size: Size) -> dict[str, float]:
    """One measurement in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", contestant, *map(str, size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{contestant} at {size} ended with {done.returncode}:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    figures["total"] = sum(figures[phase] for phase in PHASES)
    return figures


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure_all(
    contests: list[tuple[str, Size]], repeats: int, report: Callable[[str], None]
) -> dict[tuple[str, Size], dict[str, float]]:
    """Every contestant at every size in turn, and all of that `repeats` times."""
    runs: dict[tuple[str, Size], list[dict[str, float]]] = {contest: [] for contest in contests}
    for turn in range(repeats):
        for contestant, size in contests:
            report(f"{turn + 1}/{repeats}: {contestant} at {size}")
            runs[contestant, size].append(measure(contestant, size))
    return {contest: medians(measured) for contest, measured in runs.items()}


def tell(
    report: Report, figures: dict[tuple[str, Size], dict[str, float]], full: Size, halves: tuple[Size, ...]
) -> None:
    """Everything measured, the ratios to torch and the goals."""
    names = (*PHASES, "total")
    columns = [Column("size", 16), Column("who", 5), *(Column(name, 8, "{:.3f}") for name in names)]
    columns += [Column("MB", 8, "{:.0f}"), Column("lowered", 10)]
    table = report.table(0, "CPU seconds, peak memory, and how many actions the lowered schedule has", columns)
    for (who, size), measured in figures.items():
        cells = [measured[name] for name in (*names, "megabytes")]
        table.row(str(size), who, *cells, int(measured["lowered"]))
    columns = [Column("size", 16), *(Column(name, 8, "{:.1f}x") for name in names)]
    table = report.table(0, "torch / ours", columns)
    for (who, size), measured in figures.items():
        ours = figures["ours", size]
        if who == "torch":
            table.row(str(size), *(measured[name] / max(ours[name], 1e-9) for name in names))
    whole = figures["ours", full]
    for size in (full, *(size for who, size in figures if size == LARGE)):
        measured = figures["ours", size]
        seconds, gigabytes = GOALS.get(size, GOALS[FULL])
        title = f"goals for {size}: {size.computes:,} computes, {measured['lowered']:,.0f} lowered"
        table = report.table(0, title, [Column("what", 44), Column("measured", 22)])
        table.row("all four phases, s", Goal(measured["total"], seconds))
        table.row("peak memory, GiB", Goal(measured["megabytes"] / 1024, gigabytes))
        for half in halves if size == full else ():
            table.row(f"time against half, {half}", Goal(whole["total"] / figures["ours", half]["total"], GOAL_GROWTH))


def main() -> None:
    """Measure, then print."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--large", action="store_true", help=f"also {LARGE}: minutes, and 4 GiB")
        parser.add_argument("--worker", nargs=4, metavar=("WHO", "R", "M", "V"), help=argparse.SUPPRESS)

    with bench(__doc__, 3, more=more) as settings:
        if settings.worker:
            work(settings.worker[0], Size(*map(int, settings.worker[1:])))
            return
        full, halves, beside = QUICK if settings.quick else (FULL, HALVES, BESIDE_TORCH)
        contests = [(who, size) for size in beside for who in ("ours", "torch")]
        contests = list(dict.fromkeys([*contests, *(("ours", size) for size in (*halves, full))]))
        repeats = 1 if settings.quick else settings.rounds
        figures = measure_all(contests, repeats, lambda text: print(text, file=sys.stderr, flush=True))
        if settings.large:
            figures |= measure_all([("ours", LARGE)], 1, lambda text: print(text, file=sys.stderr, flush=True))
        tell(settings.report, figures, full, halves)


if __name__ == "__main__":
    main()
