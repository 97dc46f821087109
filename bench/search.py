"""How good a schedule the search finds, and how fast, beside the best family that fits.

    python bench/search.py                 a minute: the published costs, with caps, and two large pipelines
    python bench/search.py --seconds 30    more time for each answer
    python bench/search.py --quick         seconds: only shows that it runs
    python bench/search.py --json

Times of the published rows are in ms, as profiled: ranks, microbatches, F, I, W, hop. `cpu` is
`time.process_time` of the whole call. The gap is to a lower bound over everything that was
allowed, so it is at least the distance to the best schedule there is.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from penstock.schedule import FAMILIES, Costs, build, search_report, simulate, stage_costs

PUBLISHED = ((8, 24, 18.522, 18.086, 9.337, 0.601), (16, 64, 11.307, 11.254, 8.101, 0.379))
LARGE = ((32, 256, 5.0), (128, 512, 20.0))  # ranks, microbatches, goal in CPU seconds
UP_TO_FOUR = (1, 2, 3, 4)


def best_family(
    ranks: int, microbatches: int, costs: Costs, memory: float, sizes: tuple[int, ...]
) -> tuple[float, str]:
    """The shortest makespan of all families that fit, and its name."""
    found = []
    for family in FAMILIES.values():
        for size in sizes:
            if family.name == "forward-only" or (family.layout == "v") > (size == 2):
                continue
            timeline = simulate(build(family.name, ranks, microbatches, size), stage_costs(costs, size))
            if max(timeline.peak_memory) <= memory * (1 + 1e-9):
                found.append((timeline.makespan, f"{family.name} x{size}"))
    return min(found, default=(float("inf"), "-"))


def measure(
    ranks: int, microbatches: int, costs: Costs, memory: float, sizes: tuple[int, ...], seconds: float
) -> dict[str, Any]:
    """One search."""
    begin = time.process_time()
    found = search_report(ranks, microbatches, costs, memory, sizes, seconds=seconds)
    cpu = time.process_time() - begin
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "memory": memory,
        "stages_per_rank": list(sizes),
        "makespan": found.value,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "idle_share": found.timeline.bubble,
        "chosen": f"{found.chosen.placement} x{found.chosen.stages_per_rank}",
        "cpu": cpu,
    }


def line(entry: dict[str, Any]) -> str:
    """A row of the table."""
    sizes = "1" if entry["stages_per_rank"] == [1] else "1-4"
    return (
        f"{entry['ranks']:>5}{entry['microbatches']:>6}{entry['memory']:>6g}{sizes:>7}{entry['makespan']:>12.3f}"
        f"{entry['lower_bound']:>12.3f}{entry['gap']:>8.2%}{entry['idle_share']:>8.2%}{entry['chosen']:>9}"
        f"{entry['cpu']:>8.2f}  {entry.get('beside', '')}"
    )


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each answer (5)")
    parser.add_argument("--quick", action="store_true", help="no time at all, and nothing large: a smoke run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds = 0.0 if options.quick else options.seconds
    entries = []
    for ranks, microbatches, forward, backward, weight, hop in PUBLISHED[: 1 if options.quick else None]:
        costs = Costs(forward, backward, weight, hop=hop)
        for memory in (ranks, 2 * ranks):
            for sizes in ((1,), UP_TO_FOUR):
                entry = measure(ranks, microbatches, costs, memory, sizes, seconds)
                value, name = best_family(ranks, microbatches, costs, memory, sizes)
                entries.append({**entry, "beside": f"best family {value:.3f} ({name})"})
    for ranks, microbatches, goal in () if options.quick else LARGE:
        entry = measure(ranks, microbatches, Costs(11.0, 11.0, 8.0, hop=0.4), ranks, UP_TO_FOUR, 1.0)
        met = "met" if entry["cpu"] <= goal else "MISSED"
        entries.append({**entry, "beside": f"(goal: at most {goal:g} s): {met}"})
    if options.json:
        print(json.dumps(entries, indent=2))
        return
    print("ranks  mbs   cap stages    makespan       bound     gap    idle   chosen     cpu")
    print("\n".join(map(line, entries)))


if __name__ == "__main__":
    main()
