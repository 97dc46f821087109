"""How long it takes to build, lower, verify and simulate a schedule, beside the installed torch.

    python bench/schedules.py            a few minutes: the goal's size, its halves, torch at smaller sizes
    python bench/schedules.py --quick    seconds: small sizes, one repeat; only shows that it runs
    python bench/schedules.py --json

Every measurement is a process of its own, so that none inherits another's heap; the contestants
take turns, so that a busy machine slows both; the median of `--repeats` is reported. Times are
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

PHASES = ("build", "lower", "verify", "simulate")
GOAL_SECONDS, GOAL_GIGABYTES, GOAL_GROWTH = 30.0, 3.0, 2.3


class Size(NamedTuple):
    """ranks x microbatches x stages a rank"""

    ranks: int
    microbatches: int
    stages_per_rank: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))

    @property
    def computes(self) -> int:
        """Forwards and backwards."""
        return 2 * self.ranks * self.microbatches * self.stages_per_rank


FULL = Size(256, 1024, 2)
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
    return sum(map(len, program.rows))


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


def line(title: str, figures: dict[str, float]) -> str:
    """A row of the table."""
    cells = [f"{figures[name]:9.3f}" for name in (*PHASES, "total")]
    return f"{title:<24}{''.join(cells)}{figures['megabytes']:9.0f}{figures['lowered']:12,.0f}"


def table(figures: dict[tuple[str, Size], dict[str, float]], full: Size, halves: tuple[Size, ...]) -> str:
    """Everything measured, the ratios to torch and the goals."""
    heads = "".join(f"{name:>9}" for name in (*PHASES, "total", "MB"))
    lines = [f"{'CPU seconds':<24}{heads}{'lowered':>12}"]
    for (contestant, size), measured in figures.items():
        lines.append(line(f"{contestant:<6}{size}", measured))
        ours = figures.get(("ours", size))
        if contestant == "torch" and ours:
            ratios = "".join(f"{measured[name] / max(ours[name], 1e-9):8.1f}x" for name in (*PHASES, "total"))
            lines.append(f"{'  torch / ours':<24}{ratios}")
    whole = figures["ours", full]
    lines += ["", f"{full.computes:,} computes, {whole['lowered']:,.0f} lowered:"]
    gigabytes = whole["megabytes"] / 1024
    lines.append(goal(f"  all four phases {whole['total']:.1f} s", whole["total"], GOAL_SECONDS, "s"))
    lines.append(goal(f"  peak memory {gigabytes:.2f} GB", gigabytes, GOAL_GIGABYTES, "GB"))
    for half in halves:
        growth = whole["total"] / figures["ours", half]["total"]
        lines.append(goal(f"  twice the actions of {half} take {growth:.2f} times as long", growth, GOAL_GROWTH, "x"))
    return "\n".join(lines)


def goal(text: str, value: float, most: float, unit: str) -> str:
    """A figure and whether it meets its goal."""
    return f"{text} (goal: at most {most:g} {unit}): {'met' if value <= most else 'MISSED'}"


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many (3)")
    parser.add_argument("--quick", action="store_true", help="small sizes, once: a smoke run")
    parser.add_argument("--json", action="store_true", help="the medians as JSON")
    parser.add_argument("--worker", nargs=4, metavar=("WHO", "R", "M", "V"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Size(*map(int, options.worker[1:])))
        return
    full, halves, beside = QUICK if options.quick else (FULL, HALVES, BESIDE_TORCH)
    contests = [(who, size) for size in beside for who in ("ours", "torch")]
    contests = list(dict.fromkeys([*contests, *(("ours", size) for size in (*halves, full))]))
    repeats = 1 if options.quick else max(1, options.repeats)
    figures = measure_all(contests, repeats, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps([{"who": who, "size": list(size), **found} for (who, size), found in figures.items()]))
    else:
        print(table(figures, full, halves))


if __name__ == "__main__":
    main()
