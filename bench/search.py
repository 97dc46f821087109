"""How good a schedule the search finds, and how fast, beside the best family that fits.

    penstock bench search                 two minutes: the published costs, with caps, and two large pipelines
    penstock bench search --seconds 30    more time for each answer
    penstock bench search --quick         seconds: only shows that it runs

Times of the published rows are in ms, as profiled: ranks, microbatches, F, I, W, hop. `cpu` is
`time.process_time` of the whole call. The gap is to a lower bound over everything that was
allowed, so it is at least the distance to the best schedule there is. The second table is of steps that overlap: what
the search for the makespan gives there, and the one for the period.
"""

from __future__ import annotations

import time
from typing import Any

from report import Column, Goal, bench

from penstock.schedule import FAMILIES, Costs, build, search_report, simulate, stage_costs

PUBLISHED = ((8, 24, 18.522, 18.086, 9.337, 0.601), (16, 64, 11.307, 11.254, 8.101, 0.379))
CAPS = {8: (2, 4, 5, 5.34, 8, 16), 16: (4, 8, 9, 16, 32)}  # by ranks
GOALS = {(8, 5): 15.5, (8, 5.34): 13.5, (16, 9): 12.0}  # idle %, by ranks and cap
LARGE = ((32, 256, 5.0), (128, 512, 5.0))  # ranks, microbatches, goal in CPU seconds
UP_TO_FOUR = (1, 2, 3, 4)


def best_family(
    ranks: int, microbatches: int, costs: Costs, memory: float, sizes: tuple[int, ...]
) -> tuple[float, str] | tuple[None, None]:
    """The shortest makespan of all families that fit, and its name."""
    found = []
    for family in FAMILIES.values():
        for size in sizes:
            if not family.trains or (family.layout == "v") > (size == 2):
                continue
            timeline = simulate(build(family.name, ranks, microbatches, size), stage_costs(costs, size))
            if max(timeline.peak_memory) <= memory * (1 + 1e-9):
                found.append((timeline.makespan, f"{family.name} x{size}"))
    return min(found, default=(None, None))


def measure(
    ranks: int, microbatches: int, costs: Costs, memory: float, sizes: tuple[int, ...] | None, seconds: float
) -> tuple[list[object], float]:
    """One search: what its row begins with, and its CPU seconds."""
    begin = time.process_time()
    found = search_report(ranks, microbatches, costs, memory, sizes, seconds=seconds)
    cpu = time.process_time() - begin
    stages = "any" if sizes is None else f"1-{sizes[-1]}"
    chosen = f"{found.chosen.placement} x{found.chosen.stages_per_rank}"
    idle, goal = 100 * found.timeline.bubble, GOALS.get((ranks, memory)) if seconds else None
    figures = [found.value, found.lower_bound, 100 * found.gap, idle if goal is None else Goal(idle, goal)]
    return [ranks, microbatches, memory, stages, *figures, chosen], cpu


COLUMNS = [
    Column("ranks", 5),
    Column("microbatches", 5, head="mbs"),
    Column("memory", 5, "{:g}", head="cap"),
    Column("stages per rank", 6, head="stages"),
    Column("makespan", 10, "{:.3f}"),
    Column("lower bound", 10, "{:.3f}", head="bound"),
    Column("gap %", 6, "{:.2f}"),
    Column("idle %", 16, "{:.2f}"),
    Column("chosen", 7),
    Column("cpu s", 20, "{:.2f}"),
    Column("best family's makespan", 11, "{:.3f}", head="best family"),
    Column("best family", 0, head="which"),
]


STEADY_COLUMNS = [
    Column("ranks", 5),
    Column("microbatches", 5, head="mbs"),
    Column("searched for", 13),
    Column("period", 10, "{:.3f}"),
    Column("steady idle %", 14, "{:.2f}"),
    Column("idle %", 7, "{:.2f}"),
    Column("chosen", 7),
    Column("cpu s", 0, "{:.2f}"),
]


def steady(ranks: int, microbatches: int, costs: Costs, objective: Any, seconds: float) -> list[object]:
    """A row of the second table: a search in 1F1B's memory, priced where steps overlap."""
    begin = time.process_time()
    found = search_report(ranks, microbatches, costs, ranks, objective=objective, seconds=seconds)
    cpu, chosen = time.process_time() - begin, f"{found.chosen.placement} x{found.chosen.stages_per_rank}"
    idle = 100 * found.steady.idle, 100 * found.timeline.bubble
    return [ranks, microbatches, objective, found.steady.period, *idle, chosen, cpu]


def main() -> None:
    def more(parser: Any) -> None:
        parser.add_argument("--seconds", type=float, default=5.0, help="for each answer (5)")

    with bench(__doc__, more=more) as settings:
        table = settings.report.table(0, "searched within a cap of memory, beside the best family that fits", COLUMNS)
        seconds = 0.0 if settings.quick else settings.seconds
        for ranks, microbatches, forward, backward, weight, hop in PUBLISHED[: 1 if settings.quick else None]:
            costs = Costs(forward, backward, weight, hop=hop)
            for memory in CAPS[ranks]:
                cells, cpu = measure(ranks, microbatches, costs, memory, None, seconds)
                table.row(*cells, cpu, *best_family(ranks, microbatches, costs, memory, UP_TO_FOUR))
        for ranks, microbatches, goal in () if settings.quick else LARGE:
            cells, cpu = measure(ranks, microbatches, Costs(11.0, 11.0, 8.0, hop=0.4), ranks, UP_TO_FOUR, 1.0)
            table.row(*cells, Goal(cpu, goal), None, None)
        table = settings.report.table(0, "steps that overlap, in 1F1B's memory", STEADY_COLUMNS)
        for ranks, microbatches, forward, backward, weight, hop in PUBLISHED[: 1 if settings.quick else None]:
            for objective in ("makespan", "steady"):
                costs = Costs(forward, backward, weight, hop=hop)
                table.row(*steady(ranks, microbatches, costs, objective, seconds))


if __name__ == "__main__":
    main()
