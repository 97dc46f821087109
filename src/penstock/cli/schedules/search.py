"""`penstock search`: the best schedule for given costs and memory, and how near to the best possible it is.

Costs and memory are those of a whole rank, so that they mean the same whatever number of stages
a rank gets: with v stages each takes 1 / v. With --curve, idle time is shown against memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock import writing
from penstock.cli.output import fold, guarded, number, terminal_width, write, write_json, writes
from penstock.cli.schedules.costs import RankTimeOptions, amount, amounts
from penstock.cli.schedules.show import drawing
from penstock.cli.source import MOST_COMPUTES, MOST_SEARCHED, AsJson, BatchSizes, described, identity, option
from penstock.errors import UsageError
from penstock.schedule import CurvePoint, Found, search_curve, search_report
from penstock.schedule.columns import check_size
from penstock.schedule.files.text import file_kind
from penstock.tools.search.curve import SHARES
from penstock.view.figures import percent
from penstock.view.pictures.memory_curve import curve_lines, curve_page

BAR = "\N{FULL BLOCK}"
PIPE_WIDTH = 100

Memory = Annotated[
    str | None,
    option(
        "The most that a rank, or each of them, may hold, in units of --activation (default: no cap).",
        metavar="NUMBER[,...]",
    ),
]
Recompute = Annotated[
    bool, option("Also try to run forwards again in the backward, where that saves memory.", "--recompute")
]
Sizes = Annotated[
    str | None,
    option(
        "Numbers of stages on a rank to try (default: 1 to 4, and 6 and 8 if that is not too large).",
        "--stages-per-rank",
        "-v",
        metavar="N[,...]",
    ),
]
Placements = Annotated[str, option("Placements to try: loop, v.", metavar="NAME[,...]")]
Seconds = Annotated[str | None, option("How long to search; with --curve, at each cap (default: 5).", metavar="TIME")]
Effort = Annotated[
    int | None, option("How many orders to price, in place of --seconds: the same answer everywhere.", metavar="N")
]
Objective = Annotated[
    str,
    option("steady: time per step where steps overlap; span: the longest of one rank.", metavar="makespan|steady|span"),
]
Seed = Annotated[int, option("Where the random numbers start.", metavar="N")]
Save = Annotated[str | None, option("Write the schedule to a .csv or .json file.", metavar="FILE")]
Draw = Annotated[bool, option("Draw the schedule.", "--draw")]
Curve = Annotated[
    bool, option("Search at many caps, and draw idle time against memory; --memory lists the caps.", "--curve")
]
Html = Annotated[Path | None, option("With --curve: write a page, one file, no network.", metavar="FILE")]


@dataclass(frozen=True)
class SearchCostOptions(RankTimeOptions):
    """Also the memory of a microbatch."""

    activation: Annotated[str, option("Memory of one microbatch on a whole rank, F to I.", metavar="NUMBER")] = "1"
    held: Annotated[str | None, option("What of it stays between I and W (default: all of it).", metavar="NUMBER")] = (
        None
    )
    kept: Annotated[str, option("What of it a stage that recomputes keeps from F on: its input.", metavar="NUMBER")] = (
        "0"
    )


@guarded
def search(
    sizes: BatchSizes,
    given: SearchCostOptions,
    memory: Memory = None,
    recompute: Recompute = False,
    stages_per_rank: Sizes = None,
    placements: Placements = "loop,v",
    seconds: Seconds = None,
    effort: Effort = None,
    objective: Objective = "makespan",
    seed: Seed = 0,
    save: Save = None,
    draw: Draw = False,
    curve: Curve = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Find the best schedule under costs and a memory cap.

    Times are of a whole rank, in any unit, the same for all; so is memory. Given for each stage, with commas, only
    that number of stages is tried. It is never worse than a family's own order that fits, and stops before its time
    when nothing can be better.
    """
    ranks, microbatches = sizes.filled()
    several = None if stages_per_rank is None else _whole_numbers("--stages-per-rank", stages_per_rank)
    check_size(ranks, microbatches, max(several or (MOST_SEARCHED,)), MOST_COMPUTES)
    costs = given.read()
    if seconds is not None and effort is not None:
        raise UsageError("--effort counts orders in place of --seconds; give one of them")
    limit = amount("--seconds", "5" if seconds is None else seconds)
    budget: dict[str, Any] = {"seconds": limit if effort is None else None, "effort": effort, "seed": seed}
    kinds = tuple(name.strip() for name in placements.split(","))
    caps = None if memory is None else amounts("--memory", memory)
    _check_targets(save, html)
    if curve:
        single = {"--save": save, "--draw": draw, "--recompute": recompute, "--objective": objective != "makespan"}
        if wrong := next((name for name, value in single.items() if value), None):
            raise UsageError(f"{wrong} is for one schedule, and --curve draws many; leave one of them out")
        given_caps = (caps,) if isinstance(caps, float) else caps
        with _Bar((limit if effort is None else effort) * len(given_caps or SHARES)) as bar:
            points = search_curve(ranks, microbatches, costs, given_caps, several, kinds, progress=bar, **budget)
        show_curve(points, ranks, microbatches, html, as_json)
        return
    if html is not None:
        raise UsageError(
            "--html writes the page of a curve; give --curve as well, or see one schedule with penstock view"
        )
    with _Bar(limit if effort is None else effort) as bar:
        asked: dict[str, Any] = {"objective": objective, "recompute": recompute}  # what is wrong is refused there
        found = search_report(ranks, microbatches, costs, caps, several, kinds, progress=bar, **asked, **budget)
    if save is not None:
        found.schedule.save(save)
    if as_json:
        write_json(_document(found))
    else:
        _write(found, draw, save)


def _check_targets(save: str | None, html: Path | None) -> None:
    """Refuse what cannot be written before the search: what it found would be lost."""
    if save is not None:
        file_kind(Path(save))
    for name, path in (("--save", save), ("--html", html)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{name} {path}: there is no folder {Path(path).parent}; make it, or name another one")


def _write(found: Found, draw: bool, save: str | None) -> None:
    columns = terminal_width()
    chosen = found.chosen
    title = f"{described(found.schedule, 'auto')}; placement {chosen.placement}, {chosen.stages_per_rank} per rank"
    write(fold(title, columns))
    if draw:
        write(drawing(found.schedule, columns))
    if chosen.recompute:
        write(fold(f"recomputes stages {', '.join(map(str, chosen.recompute))}", columns))
    write("\n".join(_sentences(found)))
    if save is not None:
        write(f"saved to {save}")


def _whole_numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of whole numbers; give one such as 1,2,4") from None


class _Bar:
    """A progress bar on stderr, with the best so far; only a terminal sees it."""

    def __init__(self, total: float) -> None:
        columns = (TextColumn("searching"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        console = Console(stderr=True)
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=total or None)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, spent: float, value: float, bound: float) -> None:
        best = "" if value == math.inf else f"best {number(value)}, bound {number(bound)}"
        self.progress.update(self.task, completed=spent, description=best)


def _sentences(found: Found) -> list[str]:
    timeline = found.timeline
    proof = "nothing is shorter" if found.proved else f"at most {percent(found.gap)} above the shortest"
    lines = [
        f"{found.objective:<12}{number(found.value)}",
        f"lower bound {number(found.lower_bound)}: {proof}",
        f"idle share  {percent(timeline.bubble)}",
        f"steady      {number(found.steady.period)} per step, idle {percent(found.steady.idle)}, where steps overlap",
        f"peak memory {number(max(timeline.peak_memory))}",
        "",
        "stages per rank  placement  recompute      best     bound    orders",
    ]
    for tried in found.tried:
        best = number(tried.value) if tried.orders and tried.value < math.inf else "-"
        figures = f"{best:>10}{number(tried.lower_bound):>10}{tried.orders:>10}"
        lines.append(f"{tried.stages_per_rank:>15}  {tried.placement:<9}{len(tried.recompute) or '-':>11}{figures}")
    if any(not tried.orders for tried in found.tried):
        lines.append("- not tried: its bound is above what was found")
    return lines


def _document(found: Found) -> dict[str, Any]:
    timeline = found.timeline
    tried = [asdict(entry) for entry in found.tried]
    for entry in tried:
        entry["value"] = None if entry["value"] == math.inf else entry["value"]
    return {
        **identity(found.schedule),
        "placement": list(found.schedule.placement),
        "recompute": sorted(found.schedule.recompute),
        **{name: getattr(found, name) for name in ("objective", "value", "lower_bound", "gap", "seconds")},
        "makespan": timeline.makespan,
        "idle_share": timeline.bubble,
        "steady_period": found.steady.period,
        "steady_idle_share": found.steady.idle,
        "peak_memory": list(timeline.peak_memory),
        "tried": tried,
    }


def show_curve(points: Sequence[CurvePoint], ranks: int, microbatches: int, html: Path | None, as_json: bool) -> None:
    """Write the curve as text or JSON, and as a page where one is asked for."""
    title = f"{ranks} ranks, {microbatches} microbatches: idle time against memory"
    if html is not None:
        writing.save(html, curve_page(points, title))
    if as_json:
        write_json({"ranks": ranks, "microbatches": microbatches, "points": list(map(_point, points))})
        return
    columns = terminal_width() or PIPE_WIDTH
    write(fold(title, columns))
    write("\n".join(curve_lines(points, columns, BAR if writes(BAR) else "#")))
    if html is not None:
        write(f"saved to {html}")


def _point(point: CurvePoint) -> dict[str, Any]:
    found = point.found
    return {
        "memory": point.memory,
        "idle_share": point.idle,
        "makespan": found.timeline.makespan,
        "lower_bound": found.lower_bound,
        "peak_memory": list(found.timeline.peak_memory),
        "stages_per_rank": found.chosen.stages_per_rank,
        "placement": found.chosen.placement,
    }
