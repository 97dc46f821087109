"""`penstock verify`: the proof that a schedule is right and ends, or every fault that it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from penstock.cli.output import document_of, guarded, working, write, write_faults, write_json
from penstock.cli.source import AsJson, Sizes, Source, Steps, check_steps, described, identity, option, read
from penstock.errors import Fault, ScheduleError
from penstock.schedule import Op, Schedule, faults, lower
from penstock.schedule.proof.certificate import LINKS, RULES, certificate_of
from penstock.view.figures import counted

Links = Annotated[
    Literal["direction", "pair", "rank"],
    option("What has a stream of its own, in which one transfer follows another; Penstock: direction."),
]
COUNTED = (("computes", Op.F, Op.W), ("transfers", Op.SEND_F, Op.RECV_B), ("sharding", Op.UNSHARD, Op.REDUCE_GRAD))


@guarded
def verify(source: Source, sizes: Sizes, steps: Steps = 1, links: Links = "direction", as_json: AsJson = False) -> None:
    """Prove that a schedule is complete, in order and free of deadlock.

    A schedule of computes alone is proved as it is, and again with its transfers added. Exit code 1 and
    every fault, with rank, position and action, when it is not. With --steps, also that so many steps cannot deadlock.

    A deadlock depends on which transfers have to wait for each other: --links.
    """
    try:
        with working(f"proving {source}"):
            schedule = read(source, sizes)
            check_steps(schedule, steps)
            found, program = _prove(schedule, steps, links)
    except ScheduleError as error:  # The file could not even be read.
        schedule, found, program = None, list(error.faults), None
    if as_json:
        write_json({**_document(schedule, program, found, links), "steps": steps})
    elif schedule is not None and program is not None:
        write("\n".join([f"proved: {described(schedule, source)}", *_sentences(schedule, program, steps, links)]))
    else:
        title = described(schedule, source) if schedule is not None else source
        write_faults(title, found)
    if found:
        raise typer.Exit(1)


def _prove(schedule: Schedule, steps: int, links: str) -> tuple[list[Fault], Schedule | None]:
    """Return the faults of the schedule, or else of its program; and the program, where it is sound."""
    found = faults(schedule, steps, links)
    if found or "transfers" in schedule.passes:
        return found, None if found else schedule
    program = lower(schedule.compute()) if schedule.passes else lower(schedule)
    found = faults(program, steps, links)
    return found, None if found else program


def _counts(schedule: Schedule) -> dict[str, int]:
    """Count the actions of each kind; the parts of a pair are counted each."""
    by_op = Counter(part.op for _, _, part in schedule.parts())
    counts = {name: sum(by_op[op] for op in Op if first <= op <= last) for name, first, last in COUNTED}
    return {**counts, "messages": counts["transfers"] // 2}


def _sentences(schedule: Schedule, program: Schedule, steps: int, links: str) -> list[str]:
    counts = _counts(schedule) | {name: _counts(program)[name] for name in ("transfers", "messages")}
    backward = "and no backward" if schedule.forward_only else "and one backward (B, or I and W)"
    given = "in the file" if schedule is program else "added here"
    messages = counted(counts["messages"], "message")
    lines = [
        f"  {counts['computes']:,} computes: each microbatch has one forward {backward} in each stage, "
        "none before what it needs",
        f"  {counts['transfers']:,} transfers {given}: {messages}, each link's receives in the order of its sends",
    ]
    if sharding := counts["sharding"]:
        lines.append(f"  {sharding:,} sharding actions: each stage is whole when it computes, and reduced once")
    if sharding and schedule is not program:
        lines.append("  the file has sharding but no transfers: they were added to its computes alone, and proved so")
    lines.append(f"  no deadlock: the program ends with nothing buffered and one stream for {LINKS[links]}")
    if steps > 1:
        lines.append(f"  {steps} steps back to back, no rank waiting for the others in between: no deadlock either")
    lines.append(f"  certificate {certificate_of(program, links).digest} (rules {RULES})")
    return lines


def _document(schedule: Schedule | None, program: Schedule | None, found: list[Fault], links: str) -> dict[str, Any]:
    document: dict[str, Any] = {"proved": not found}
    if schedule is not None:
        document |= identity(schedule)
    if program is not None:
        document |= {**_counts(program), "certificate": asdict(certificate_of(program, links))}
        if schedule is not None and schedule is not program:  # transfers are added to the computes alone
            document["sharding"] = _counts(schedule)["sharding"]
            document["transfers_added"] = True
    return document | {"faults": [document_of(fault) for fault in found]}
