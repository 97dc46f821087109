"""`penstock whatif`: what a recorded run would take with other ranks, microbatches or schedules.

The run's own costs go into the simulator. How well that works is said first: the run itself, as it
was measured and as the same costs predict it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from penstock.cli.output import fold, guarded, terminal_width, working, write, write_json
from penstock.cli.runs import load_run
from penstock.cli.schedules.costs import amount
from penstock.cli.source import AsJson, Sizes, identity, is_file, option, read_one_of
from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Costs, Op, Schedule, Timeline, simulate
from penstock.schedule.files.drawing import table
from penstock.tools.search.calibrate import costs_of, fitted, outside
from penstock.view.figures import percent, time_text

From = Annotated[
    str, option("A recorded run: timeline.save's file, or its folder.", "--from", metavar="RUN", show_default=False)
]
Schedules = Annotated[
    list[str] | None,
    option(
        f"What to try, once or several times: {', '.join(FAMILIES)}, or a file (default: the run's own).",
        "--schedule",
        "-s",
        metavar="NAME|FILE",
        show_default=False,
    ),
]
HopTime = Annotated[str | None, option("Another time from rank to rank than the run's, in seconds.", metavar="TIME")]

FIGURES = ("makespan", "step", "a_microbatch", "idle_share", "peak_activations")


@dataclass(frozen=True)
class Prediction:
    """One schedule under the run's costs."""

    schedule: Schedule
    label: str
    makespan: float
    step: float  # the makespan and what the run spent outside of it
    idle_share: float
    peak_activations: int

    @property
    def a_microbatch(self) -> float:
        """Time of the step for each microbatch."""
        return self.step / self.schedule.microbatches


@guarded
def whatif(
    source: From, sizes: Sizes, schedules: Schedules = None, hop: HopTime = None, as_json: AsJson = False
) -> None:
    """Predict the step time of other sizes and schedules from a recorded run.

    Microbatches keep their size, so more of them are a larger batch. Another number of stages is taken to be an even
    cut of the same model.
    """
    with working(f"reading {source}"):
        run = load_run(source)
    costs = costs_of(run)
    beside = outside(run)
    itself = simulate(run.schedule, costs).makespan
    if hop is not None:
        costs = replace(costs, hop=amount("--hop", hop))
    with working("simulating"):
        found = [_predict(name, run, costs, beside, sizes) for name in schedules or [run.schedule.name]]
    error = itself / run.makespan - 1 if run.makespan else 0.0
    if as_json:
        write_json(_document(run, costs, itself, error, beside, found))
        return
    columns = terminal_width()
    unit = run.unit
    title = (
        f"{run.schedule.name or 'the run'}, {run.ranks} ranks, {run.schedule.microbatches} microbatches: makespan "
        f"{time_text(run.makespan, unit)} measured, {time_text(itself, unit)} predicted from its own costs "
        f"(error {100 * error:+.1f} %)"
    )
    write(fold(title, columns))
    write(f"\n{_table(found, unit)}\n")
    write(fold("; ".join(_notes(run, found, beside)), columns))


def _predict(name: str, run: Timeline, costs: Costs, beside: float, sizes: Sizes) -> Prediction:
    own = name == run.schedule.name
    if own and sizes == Sizes():
        schedule = run.schedule
    elif not name:
        raise UsageError("the run's schedule has no name to build others by; give --schedule")
    else:
        schedule = read_one_of(name, sizes if is_file(name) else sizes.or_those_of(run.schedule))
    timeline = simulate(schedule, fitted(costs, schedule, run.schedule.stages))
    return Prediction(
        schedule,
        name if is_file(name) and not own else schedule.name or "the run's own",
        timeline.makespan,
        timeline.makespan + beside,
        timeline.bubble,
        max(timeline.peak_activations),
    )


def _table(found: list[Prediction], unit: str) -> str:
    rows: list[tuple[str, ...]] = [
        ("schedule", "ranks", "stages", "microbatches", "makespan", "step", "a microbatch", "idle", "in flight")
    ]
    best = min(entry.a_microbatch for entry in found)
    for entry in found:
        schedule = entry.schedule
        star = " *" if len(found) > 1 and entry.a_microbatch == best else ""
        sizes = (str(schedule.ranks), str(schedule.stages), str(schedule.microbatches))
        times = (time_text(time, unit) for time in (entry.makespan, entry.step, entry.a_microbatch))
        rows.append((entry.label + star, *sizes, *times, percent(entry.idle_share), str(entry.peak_activations)))
    return table(rows, left=[0])


def _notes(run: Timeline, found: list[Prediction], beside: float) -> list[str]:
    notes = [f"a step is the makespan and {time_text(beside, run.unit)} that the run spent outside of it"]
    recut = sorted({entry.schedule.stages for entry in found} - {run.schedule.stages})
    if recut:
        notes.append(
            f"{', '.join(map(str, recut))} stages are taken to be even cuts of the {run.schedule.stages} measured"
        )
    ops = {part.op for span in run.spans for part in span.action.parts()}
    split = any(part.op is Op.I for entry in found for _, _, part in entry.schedule.parts())
    if split and Op.I not in ops:
        notes.append("the run has full backwards only: I and W are taken as half of B each")
    if len(found) > 1:
        notes.append("* least time a microbatch")
    return notes


def _document(
    run: Timeline, costs: Costs, itself: float, error: float, beside: float, found: list[Prediction]
) -> dict[str, Any]:
    return {
        "unit": run.unit,
        "run": {"makespan": run.makespan, "predicted": itself, "error": error, "outside": beside},
        "costs": asdict(costs),
        "predictions": [
            {**identity(entry.schedule), "schedule": entry.label, **{name: getattr(entry, name) for name in FIGURES}}
            for entry in found
        ],
    }
