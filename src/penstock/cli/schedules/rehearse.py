"""`penstock rehearse`: a schedule on the real runtime of all its ranks, on virtual time, with faults by plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.output import fold, guarded, number, terminal_width, working, write, write_json
from penstock.cli.schedules.costs import TravelOptions, amount
from penstock.cli.schedules.simulate import Jitter, Seed
from penstock.cli.source import AsJson, Sizes, Source, count, described, identity, option, read_proved
from penstock.view.figures import counted

SHOWN = 8  # ranks whose notices are shown

Faults = Annotated[
    list[str],
    option(
        "What goes wrong, such as 'die 3 at 12.5', 'stop 3 at 3B2 for 40' or 'lose 2SEND_F4'; may be repeated.",
        "--fault",
        "-f",
        metavar="TEXT",
        default_factory=list,
        show_default=False,
    ),
]
Steps = Annotated[int, count("Training steps.")]
Timeout = Annotated[str, option("How long a rank may be silent.", metavar="SECONDS")]
StoreHost = Annotated[
    int | None, count("The rank whose process has the store (default: the launcher has it).", least=0, metavar="RANK")
]


@guarded
def rehearse(
    source: Source,
    faults: Faults,
    sizes: Sizes,
    given: TravelOptions,
    steps: Steps = 1,
    timeout: Timeout = "60",
    jitter: Jitter = "0",
    seed: Seed = 0,
    store_host: StoreHost = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a schedule: the real runtime of every rank on virtual time, with faults.

    Times are in seconds. Exit code 1 if a rank hung, or a loss or gradient was not that of a plain loop; a failure that
    every rank was told of is no fault of the rehearsal.
    """
    limit, share = amount("--timeout", timeout), amount("--jitter", jitter)
    schedule = read_proved(source, sizes)
    costs = given.read(schedule.stages)
    from penstock.tools.rehearsal.rehearse import rehearse as run  # loads torch and greenlet

    with working(f"rehearsing {source}"):
        what: dict[str, Any] = {"seed": seed, "faults": faults, "steps": steps, "jitter": share, "timeout": limit}
        found = run(schedule, costs, store_host=store_host, record=False, **what)
    if as_json:
        write_json({**identity(schedule), "seed": seed, **_document(found)})
    else:
        columns = terminal_width()
        for line in _lines(found, described(schedule, source), steps):
            write(fold(line, columns))
    if found.hung or not found.is_exact:
        raise typer.Exit(1)


def _lines(found: Any, title: str, steps: int) -> list[str]:
    lines = [title, "", f"makespan    {number(found.makespan)}"]
    if steps > 1:
        lines.append(f"steps       {min(found.completed)} of {steps} completed by all ranks")
    results = "those of a plain loop" if any(found.completed) else "none: no step was completed"
    lines.append(f"results     {results if found.is_exact else 'NOT those of a plain loop'}")
    lines.append(f"faults      {'; '.join(map(str, found.struck)) or 'none happened'}")
    if found.hung:
        lines.append(f"HUNG        ranks {', '.join(map(str, found.hung))}")
    if found.notices:
        lines += ["", str(found.notices[0].error).partition("\n")[0], ""]
        lines += [_told(notice) for notice in found.notices[:SHOWN]]
    if (more := len(found.notices) - SHOWN) > 0:
        lines.append(f"{counted(more, 'notice')} more, the last at {number(found.notices[-1].time)}")
    return lines


def _told(notice: Any) -> str:
    named = "nobody" if notice.named is None else f"rank {notice.named}"
    return f"rank {notice.rank} knew at {number(notice.time)}, in step {notice.step}, and named {named}"


def _document(found: Any) -> dict[str, Any]:
    names = ("makespan", "makespans", "seconds", "is_exact", "hung", "completed", "store_requests")
    document = {name: getattr(found, name) for name in names}
    document["faults"] = [str(fault) for fault in found.struck]
    document["notices"] = [
        {"rank": each.rank, "step": each.step, "time": each.time, "named": each.named, "error": str(each.error)}
        for each in found.notices
    ]
    return document
