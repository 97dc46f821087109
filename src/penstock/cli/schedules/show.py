"""`penstock show`: a schedule as a picture, with what to know about it below."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import complain, fold, guarded, paints, shortened, terminal_width, write
from penstock.cli.source import AsJson, Sizes, Source, count, described, is_file, option, read
from penstock.errors import UsageError
from penstock.schedule import Op, Schedule, Timeline, faults, lower, simulate, steady_state
from penstock.schedule.files.text import to_json
from penstock.view.figures import MEANINGS as COMPUTES
from penstock.view.figures import counted, percent

MEANINGS = {op: f"{op} {meaning}" for op, meaning in COMPUTES.items() if op.is_compute} | {
    Op.SEND_F: "SEND_F/RECV_F an output",
    Op.SEND_B: "SEND_B/RECV_B a gradient",
    Op.UNSHARD: "UNSHARD/RESHARD a stage's parameters",
    Op.REDUCE_GRAD: "REDUCE_GRAD over data parallel ranks",
}
ROUNDING = 1e-9

Width = Annotated[
    int | None, count("Wrap the drawing (default: the terminal; a pipe is not wrapped).", least=20, metavar="COLUMNS")
]
Lowered = Annotated[bool, option("The program that is run: with transfers, no idle slots.", "--lowered")]
Save = Annotated[Path | None, option("Also write it, to .csv (torch's dialect) or .json (everything).", metavar="FILE")]


@guarded
def show(
    source: Source,
    sizes: Sizes,
    lowered: Lowered = False,
    width: Width = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Draw a schedule: a row for each rank, a column for each time slot."""
    schedule = read(source, sizes)
    timeline, steady, found = None, 0.0, faults(schedule) if is_file(source) else []
    if lowered and schedule.passes and "transfers" not in schedule.passes:
        raise UsageError(
            f"{source} has {' and '.join(sorted(schedule.passes))} but no transfers, and lowering starts from computes "
            "alone; show it without --lowered, or take those actions out"
        )
    if not found:
        timeline, steady = simulate(schedule), steady_state(schedule).idle
        schedule = lower(schedule) if lowered and not schedule.passes else schedule
    if save is not None:
        schedule.save(save)
    if as_json:
        write(_document(schedule, timeline, steady))
    else:
        columns = terminal_width() if width is None else width
        facts = [*_gaps(schedule), f"placement {shortened(schedule.placement)}"]
        facts += _costs(timeline, steady) if timeline else []
        write(fold(described(schedule, source), columns))
        write(drawing(schedule, columns))
        write(f"\n{fold(legend(schedule), columns)}")
        write(fold("; ".join(facts), columns))
        if save is not None:
            write(f"saved to {save}")
    if found:  # drawn all the same: seeing it helps
        count = counted(len(found), "fault")
        complain(f"{source} has {count} and must not be run; penstock verify {source} lists all")
        raise typer.Exit(1)


def drawing(schedule: Schedule, width: int | None) -> str:
    """Draw the grid, with colours where stdout takes them."""
    return schedule.draw(width=width, color=paints())


def legend(schedule: Schedule) -> str:
    """Explain the letters in the drawing; only those that are in it."""
    columns, there = schedule.columns, schedule.ops
    words = [meaning for op, meaning in MEANINGS.items() if op in there]
    if sum(columns.lengths) > columns.size - len(columns.second) or len(set(columns.lengths)) > 1:
        words.append(". idle")
    if len(columns.second):
        words.append("(..;..) a pair that may overlap")
    return "; ".join(["2F0 is the forward of stage 2, microbatch 0", *words])


def _gaps(schedule: Schedule) -> list[str]:
    """Describe slots in which no rank does anything: nothing needs them, and a run has none of them."""
    used = set(schedule.columns.position.tolist())
    gaps = [slot for slot in range(max(used, default=0)) if slot not in used]
    slots = "slots" if len(gaps) > 1 else "slot"
    return [f"no rank does anything in {slots} {shortened(gaps)}, which a run skips"] if gaps else []


def _costs(timeline: Timeline, steady: float) -> list[str]:
    overlapped = f", {percent(steady)} where steps overlap" if timeline.bubble - steady > ROUNDING else ""
    peaks = f"peak activations by rank {shortened(timeline.peak_activations)} (one: a microbatch in a stage)"
    return [f"idle share {percent(timeline.bubble)} (F, I and W take 1, B 2, hops nothing){overlapped}", peaks]


def _document(schedule: Schedule, timeline: Timeline | None, steady: float) -> str:
    """Make what `--save x.json` writes, with the facts below the drawing: it loads back."""
    return to_json(
        schedule,
        ranks=schedule.ranks,
        stages=schedule.stages,
        idle_share=timeline.bubble if timeline else None,
        steady_idle_share=steady if timeline else None,
        peak_activations=list(timeline.peak_activations) if timeline else None,
    ).rstrip()
