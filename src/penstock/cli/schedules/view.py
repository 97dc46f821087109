"""`penstock view`: schedules and recorded runs as Gantt charts, alone or side by side.

Beside a recorded run, a schedule is priced with that run's own costs, so that the two are in one
unit and the difference means something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.cli.output import fold, guarded, paints, terminal_width, working, write, write_json, writes
from penstock.cli.runs import find_run, load_run
from penstock.cli.schedules.costs import Forward, Hop, Input, Weight, amount, amounts
from penstock.cli.source import AsJson, Microbatches, Ranks, StagesPerRank, identity, is_file, read_one_of, whole
from penstock.schedule import FAMILIES, Costs, Schedule, Timeline, simulate
from penstock.schedule.timing.calibrate import costs_of, fitted
from penstock.view.account import account
from penstock.view.figures import SHARES, idle_shares, printable
from penstock.view.gantt import IDLE, gantt
from penstock.view.page import save_page
from penstock.view.perfetto import save_trace
from penstock.view.png import save_png
from penstock.view.run import Run
from penstock.view.svg import save_svg

PIPE_WIDTH = 100

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME|FILE...",
        help=f"Families ({', '.join(FAMILIES)}), schedules (.csv, .json) and recorded runs (.json, or their folder).",
        show_default=False,
    ),
]
Predicted = Annotated[
    bool, typer.Option("--predicted", help="Beside each recorded run, what its own costs would predict.")
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page: one file, no network.")]
Svg = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture for a document.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture as pixels.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")]
Width = Annotated[
    int | None, typer.Option(parser=whole(24), metavar="COLUMNS", help=f"Columns of the chart (a pipe: {PIPE_WIDTH}).")
]


@guarded
def view(
    sources: Sources,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    predicted: Predicted = False,
    forward: Forward = "1",
    input: Input = "1",
    weight: Weight = "1",
    hop: Hop = "0",
    html: Html = None,
    svg: Svg = None,
    png: Png = None,
    trace: Trace = None,
    width: Width = None,
    as_json: AsJson = False,
) -> None:
    """Look at schedules and recorded runs: as a chart here, a page, a picture or a trace.

    Several are shown on one scale. Beside a recorded run a schedule is priced with that run's costs, and built for
    its ranks and microbatches unless others are given.
    """
    given = {"forward": forward, "input": input, "weight": weight, "hop": hop}
    with working("reading"):
        runs = _runs(sources, (ranks, microbatches, stages_per_rank), predicted, given)
    writers: list[tuple[Path | None, Callable[[Sequence[Run], Path], None]]] = [
        (html, save_page),
        (svg, save_svg),
        (png, save_png),
        (trace, save_trace),
    ]
    saved = []
    for path, save in writers:
        if path is not None:
            save(runs, path)
            saved.append(str(path))
    if as_json:
        write_json({"runs": [_document(run) for run in runs]})
        return
    columns = width or terminal_width() or PIPE_WIDTH
    write(_chart(runs, columns))
    for run in runs:
        if run.timeline.measured:
            write(f"\n{run.label}: where the time of each rank went")
            write("\n".join(fold(line, columns) for line in account(run.timeline).lines()))
    if saved:
        write(f"\nsaved to {', '.join(saved)}")


Sizes = tuple[int | None, int | None, int | None]


def _runs(sources: Sequence[str], sizes: Sizes, predicted: bool, given: dict[str, str]) -> list[Run]:
    recorded = {source: load_run(source) for source in sources if find_run(source) is not None}
    first = next(iter(recorded.values()), None)
    costs = None if first is None else costs_of(first)
    runs = []
    for source in sources:
        if source in recorded:
            own = recorded[source]
            if predicted:
                runs.append(Run(f"{_label(source)}, predicted", _priced(own.schedule, costs_of(own))))
            runs.append(Run(_label(source), own))
            continue
        if first is not None and costs is not None:
            wanted = (sizes[0] or first.ranks, sizes[1] or first.schedule.microbatches, sizes[2])
            schedule = read_one_of(source, *((None,) * 3 if is_file(source) else wanted))
            timeline = _priced(schedule, fitted(costs, schedule, first.schedule.stages))
        else:
            schedule = read_one_of(source, *sizes)
            timeline = simulate(schedule, _stated(schedule, given, several=len(sources) > 1))
        runs.append(Run(_label(source) if is_file(source) else schedule.name, timeline))
    return runs


def _label(source: str) -> str:
    return printable(Path(source).name or source)


def _priced(schedule: Schedule, costs: Costs) -> Timeline:
    return replace(simulate(schedule, costs), unit="s")


def _stated(schedule: Schedule, given: dict[str, str], several: bool) -> Costs:
    """The options' costs; of several schedules a rank's, so that one with more stages does not look slower."""
    share = schedule.placement.stages_per_rank if several else 1
    times: dict[str, Any] = {}
    for name in ("forward", "input", "weight"):
        value = amounts(f"--{name}", given[name], schedule.stages)
        times[name] = value / share if isinstance(value, float) else value
    return Costs(**times, hop=amount("--hop", given["hop"]))


def _chart(runs: Sequence[Run], columns: int) -> str:
    colour = paints()
    console = Console(width=columns, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as captured:
        console.print(gantt(runs, columns, ascii_only=not writes(IDLE)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _document(run: Run) -> dict[str, Any]:
    timeline = run.timeline
    return {
        "label": run.label,
        "measured": timeline.measured,
        "unit": timeline.unit,
        **identity(timeline.schedule),
        "makespan": timeline.makespan,
        "idle_share": timeline.bubble,
        "idle_by_rank": [dict(zip(SHARES, shares, strict=True)) for shares in idle_shares(timeline)],
        "peak_activations": list(timeline.peak_activations),
        "account": account(timeline).document(),
    }
