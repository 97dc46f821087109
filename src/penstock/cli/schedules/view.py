"""`penstock view`: schedules and recorded runs as Gantt charts, alone or side by side.

Beside a recorded run, a schedule is priced with that run's own costs, so that the two are in one
unit and the difference means something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import fold, guarded, rendered, terminal_width, working, write, write_json, writes
from penstock.cli.runs import ShownRun, is_run, load_recording
from penstock.cli.schedules.costs import TimeOptions, amount
from penstock.cli.source import AsJson, Sizes, complete_source, count, identity, is_file, option, read_one_of
from penstock.schedule import FAMILIES, Costs, Schedule, Timeline, simulate
from penstock.tools.search.calibrate import costs_of, fitted
from penstock.view.account import account
from penstock.view.figures import SHARES, idle_shares, printable
from penstock.view.gantt import IDLE, gantt
from penstock.view.page import save_page
from penstock.view.perfetto import save_trace
from penstock.view.pictures.png import save_png
from penstock.view.pictures.svg import save_svg
from penstock.view.run import Run

PIPE_WIDTH = 100

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME|FILE...",
        help=f"Families ({', '.join(FAMILIES)}), schedules (.csv, .json) and recorded runs (.json, or their folder).",
        show_default=False,
        autocompletion=complete_source,
    ),
]
Predicted = Annotated[bool, option("Beside each recorded run, what its own costs would predict.", "--predicted")]
Html = Annotated[Path | None, option("Write a page: one file, no network.", metavar="FILE")]
Svg = Annotated[Path | None, option("Write a picture for a document.", metavar="FILE")]
Png = Annotated[Path | None, option("Write the picture as pixels.", metavar="FILE")]
Trace = Annotated[Path | None, option("Write a trace for Perfetto or chrome://tracing.", metavar="FILE")]
ActivationBytes = Annotated[
    str | None,
    option(
        "Bytes that one microbatch holds on a rank, in all its stages: memory is then shown in bytes.",
        "--activation",
        metavar="BYTES",
    ),
]
Width = Annotated[int | None, count(f"Columns of the chart (a pipe: {PIPE_WIDTH}).", least=24, metavar="COLUMNS")]


@guarded
def view(
    sources: Sources,
    sizes: Sizes,
    times: TimeOptions,
    predicted: Predicted = False,
    html: Html = None,
    svg: Svg = None,
    png: Png = None,
    trace: Trace = None,
    activation: ActivationBytes = None,
    width: Width = None,
    as_json: AsJson = False,
) -> None:
    """Look at schedules and recorded runs: as a chart here, a page, a picture or a trace.

    Several are shown on one scale. Beside a recorded run a schedule is priced with that run's costs, and built for
    its ranks and microbatches unless others are given. Of a folder with several recorded steps, the median one is
    shown.
    """
    held = None if activation is None else amount("--activation", activation)
    with working("reading"):
        recorded = {source: load_recording(source) for source in sources if is_run(source)}
        runs = _runs(sources, recorded, sizes, times, predicted)
        if held is not None:
            runs = [run._replace(activation=(held,) * run.timeline.ranks) for run in runs]
    notes = [note for each in recorded.values() for note in each.notes]
    saved = list(_save(runs, notes, recorded, {"html": html, "svg": svg, "png": png, "trace": trace}))
    if as_json:
        write_json({"notes": notes, "runs": [_document(run) for run in runs]})
    elif saved:
        write(f"saved to {', '.join(saved)}")
    else:
        _write(runs, notes, width or terminal_width() or PIPE_WIDTH)


def _save(
    runs: Sequence[Run], notes: Sequence[str], recorded: dict[str, ShownRun], paths: dict[str, Path | None]
) -> Iterator[str]:
    """Write the files that are asked for; their names."""
    steps = [each.steps for each in recorded.values() if each.steps is not None]
    if paths["html"] is not None:
        save_page(runs, paths["html"], notes=notes, recordings=steps[0] if len(steps) == 1 else None)
    for name, save in (("svg", save_svg), ("png", save_png), ("trace", save_trace)):
        if (path := paths[name]) is not None:
            save(runs, path)
    return (str(path) for path in paths.values() if path is not None)


def _write(runs: Sequence[Run], notes: Sequence[str], columns: int) -> None:
    """Write the chart, and of recorded runs what to know first and where their time went."""
    for note in notes:
        write(fold(note, columns))
    if notes:
        write("")
    write(rendered(gantt(runs, columns, ascii_only=not writes(IDLE)), columns))
    for run in runs:
        if run.timeline.measured:
            write(f"\n{run.label}: where the time of each rank went")
            write("\n".join(fold(line, columns) for line in account(run.timeline).lines()))


def _runs(
    sources: Sequence[str], recorded: dict[str, ShownRun], sizes: Sizes, times: TimeOptions, predicted: bool
) -> list[Run]:
    first = next((each.timeline for each in recorded.values()), None)
    costs = None if first is None else costs_of(first)
    runs = []
    for source in sources:
        if source in recorded:
            own = recorded[source].timeline
            if predicted:
                runs.append(Run(f"{_label(source)}, predicted", _priced(own.schedule, costs_of(own))))
            runs.append(Run(_label(source), own))
            continue
        if first is not None and costs is not None:
            schedule = read_one_of(source, Sizes() if is_file(source) else sizes.or_those_of(first.schedule))
            timeline = _priced(schedule, fitted(costs, schedule, first.schedule.stages))
        else:
            schedule = read_one_of(source, sizes)
            timeline = simulate(schedule, _stated(schedule, times, several=len(sources) > 1))
        runs.append(Run(_label(source) if is_file(source) else schedule.name, timeline))
    return runs


def _label(source: str) -> str:
    return printable(Path(source).name or source)


def _priced(schedule: Schedule, costs: Costs) -> Timeline:
    return replace(simulate(schedule, costs), unit="s")


def _stated(schedule: Schedule, times: TimeOptions, several: bool) -> Costs:
    """Return the options' costs; of several schedules a rank's, so that one with more stages does not look slower."""
    costs, share = times.read(schedule.stages), schedule.placement.stages_per_rank if several else 1
    own = {name: getattr(costs, name) for name in ("forward", "input", "weight")}
    shared: dict[str, Any] = {name: value / share for name, value in own.items() if isinstance(value, float)}
    return replace(costs, **shared)


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
        "peak_memory": run.peak_memory,
        "account": account(timeline).document(),
    }
