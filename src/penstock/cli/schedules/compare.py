"""`penstock compare`: every family side by side, in units in which they can be compared.

A family with two stages per rank has stages half as large. So a stage costs 1 / (stages per rank)
here, and peak activations are counted in microbatches of a whole rank: one row's numbers mean
the same as the next one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from rich import box
from rich.table import Table

from penstock.cli.output import fold, guarded, number, rendered, terminal_width, working, write, write_json
from penstock.cli.schedules.costs import RankTimeOptions, amount
from penstock.cli.schedules.show import drawing
from penstock.cli.source import MOST_COMPUTES, AsJson, Sizes, option
from penstock.schedule import FAMILIES, Costs, Family, Schedule, build, simulate, steady_state
from penstock.schedule.columns import check_size
from penstock.view.figures import counted, percent

ROUNDING = 1e-9
FIGURES = {"makespan": number, "idle_share": percent, "steady_idle_share": percent, "peak_activations": number}
WIDE = 1000  # columns of a pipe: no cell is ever folded there
Draw = Annotated[bool, option("Draw each schedule as well.", "--draw")]


@dataclass(frozen=True)
class Compared:
    """One family at the sizes that were asked for."""

    family: Family
    schedule: Schedule
    makespan: float
    idle_share: float
    steady_idle_share: float  # Idle share where steps overlap.
    peak_activations: float  # Counted in microbatches of a whole rank.

    @property
    def stages_per_rank(self) -> int:
        return self.schedule.placement.stages_per_rank


@guarded
def compare(sizes: Sizes, given: RankTimeOptions, draw: Draw = False, as_json: AsJson = False) -> None:
    """Build and price every family side by side.

    --stages-per-rank is for the families whose stages go round the ranks in a loop; the others have one large stage
    per rank, or the two of a V.
    """
    (ranks, microbatches), several = sizes.filled(), sizes.stages_per_rank
    *times, hop = (amount(f"--{name}", text) for name, text in vars(given).items())
    check_size(ranks, microbatches, max(2, several or 0), MOST_COMPUTES)
    with working("building every family"):
        entries = [_entry(family, ranks, microbatches, several, times, hop) for family in FAMILIES.values()]
    best = _best(entries)
    if as_json:
        write_json(_document(ranks, microbatches, entries, best))
        return
    columns = terminal_width()
    if draw:
        for entry in entries:
            write(fold(f"{entry.family.name}: {entry.family.summary}", columns))
            write(f"{drawing(entry.schedule, columns)}\n")
    _write_table(ranks, microbatches, entries, best)
    write(fold(_note(entries, microbatches * sum(times)), columns))


def _entry(
    family: Family, ranks: int, microbatches: int, stages_per_rank: int | None, times: list[float], hop: float
) -> Compared:
    loops = family.layout == "loop" and family.stages_per_rank > 1
    schedule = build(family.name, ranks, microbatches, stages_per_rank if loops else None)
    share = schedule.placement.stages_per_rank
    forward, backward_input, weight = (time / share for time in times)
    costs = Costs(forward=forward, input=backward_input, weight=weight, hop=hop)
    timeline, steady = simulate(schedule, costs), steady_state(schedule, costs)
    peak = max(timeline.peak_activations) / share
    return Compared(family, schedule, timeline.makespan, timeline.bubble, steady.idle, peak)


def _best(entries: list[Compared]) -> dict[str, float]:
    """Return the lowest of each figure among the families that train."""
    training = [entry for entry in entries if not entry.schedule.forward_only]
    return {name: min(getattr(entry, name) for entry in training) for name in FIGURES}


def _is_best(entry: Compared, name: str, best: dict[str, float]) -> bool:
    return not entry.schedule.forward_only and getattr(entry, name) <= best[name] * (1 + ROUNDING) + ROUNDING


def _cells(entry: Compared, best: dict[str, float]) -> Iterator[str]:
    yield entry.family.name
    yield str(entry.stages_per_rank)
    for name, shown in FIGURES.items():
        text = shown(getattr(entry, name))
        yield f"[bold green]{text} *[/]" if _is_best(entry, name, best) else f"{text}  "


def _write_table(ranks: int, microbatches: int, entries: list[Compared], best: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("family", no_wrap=True)
    for heading in ("stages\nper rank", "makespan", "idle\nshare", "steady\nidle", "peak\nactivations"):
        table.add_column(heading, justify="right", overflow="fold")
    for entry in entries:
        table.add_row(*_cells(entry, best))
    lines = rendered(table, terminal_width() or WIDE).splitlines()
    write("\n".join([f"{counted(ranks, 'rank')}, {counted(microbatches, 'microbatch')}", *filter(None, lines), ""]))


def _note(entries: list[Compared], work: float) -> str:
    words = [
        "* best of the families that train",
        f"work of one rank without waiting: {number(work)}",
        "peak activations in microbatches of a whole rank",
        "steady idle: of many steps that overlap",
    ]
    if any(action is not None and action.pair for entry in entries for action in entry.schedule.rows[0]):
        words.append("overlapped pairs (dualpipe-v) are priced one part after the other")
    return "; ".join(words)


def _document(ranks: int, microbatches: int, entries: list[Compared], best: dict[str, float]) -> dict[str, Any]:
    families = [
        {
            "family": entry.family.name,
            "stages_per_rank": entry.stages_per_rank,
            **{name: getattr(entry, name) for name in FIGURES},
            "best": [name for name in best if _is_best(entry, name, best)],
        }
        for entry in entries
    ]
    return {"ranks": ranks, "microbatches": microbatches, "families": families}
