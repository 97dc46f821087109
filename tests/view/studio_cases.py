"""Random cases for the rules of the studio, each with Python's answer, as plain values that a page can compare with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from penstock.schedule import FAMILIES, Costs, Placement, Schedule, build, simulate
from penstock.schedule.proof.verify import faults
from penstock.tools.search.bounds.lower_bound import lower_bound

# Times that are sums of powers of two, so that the two languages add them up without rounding.
TIMES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def cases(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """So many cases: a schedule is built, maybe damaged, proved, priced and bounded."""
    draw = random.Random(seed)
    names = list(FAMILIES)
    for number in range(count):
        yield case(draw, names[number % len(names)])


def case(draw: random.Random, name: str) -> dict[str, Any]:
    """One case of a family."""
    ranks, microbatches = draw.choice((1, 2, 3, 4, 5, 6, 8)), draw.randint(1, 20)
    each = 2 if FAMILIES[name].layout == "v" else draw.randint(1, 4)
    schedule = build(name, ranks, microbatches, each)
    times = {kind: draw.choice(TIMES) for kind in ("forward", "input", "weight")}
    costs = Costs(**times, hop=draw.choice((0.0, 0.25, 1.0)))
    cap = draw.choice((None, None, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0))
    timeline = simulate(schedule, costs)
    bound = lower_bound(
        schedule.placement, microbatches, costs, None if cap is None else max(cap * each, each), quick=True
    )
    damaged = damage(draw, schedule)
    path = set(map(id, timeline.critical_path))
    return {
        "build": [name, ranks, microbatches, each],
        "costs": {**times, "hop": costs.hop},
        "cap": None if cap is None else max(cap * each, each),
        "rows": cells(schedule),
        "placement": list(schedule.placement),
        "start": [span.start for span in timeline.spans],
        "end": [span.end for span in timeline.spans],
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peaks": list(timeline.peak_activations),
        "critical": [place for place, span in enumerate(timeline.spans) if id(span) in path],
        "bound": bound,
        "damaged": cells(damaged),
        "faults": [
            [fault.rank, fault.position, None if fault.action is None else str(fault.action), fault.message]
            for fault in faults(damaged)
        ],
    }


def cells(schedule: Schedule) -> list[list[str]]:
    """The rows as text, empty where a rank idles."""
    return [schedule.columns.texts(rank, "") for rank in range(schedule.ranks)]


def damage(draw: random.Random, schedule: Schedule) -> Schedule:
    """The schedule with a few actions moved, doubled, left out or changed; idle slots are gone."""
    rows = [[text for text in row if text] for row in cells(schedule)]
    for _ in range(draw.randint(0, 3)):
        _damage_once(draw, rows)
    return Schedule(
        rows,
        placement=Placement(schedule.placement.by_stage),
        microbatches=schedule.microbatches,
        topology=schedule.topology,
        forward_only=schedule.forward_only,
    )


def _damage_once(draw: random.Random, rows: list[list[str]]) -> None:
    row = draw.choice([row for row in rows if row])
    place = draw.randrange(len(row))
    kind = draw.choice(("move", "move", "move", "near", "pair", "away", "double", "drop", "rename"))
    text = row.pop(place)
    if kind == "move":
        row.insert(draw.randint(0, len(row)), text)
    elif kind == "pair" and place < len(row) and "(" not in text + row[place] and ("F" in text) != ("F" in row[place]):
        row[place] = f"({text};{row[place]})OVERLAP_{'F_B' if 'F' in text else 'B_F'}"
    elif kind in ("near", "pair"):
        row.insert(max(0, min(len(row), place + draw.choice((-1, 1)))), text)
    elif kind == "away":
        other = draw.choice(rows)
        other.insert(draw.randint(0, len(other)), text)
    elif kind == "double":
        row.insert(place, text)
        row.insert(draw.randint(0, len(row)), text)
    elif kind == "rename":
        row.insert(place, f"{draw.randint(0, 9)}{draw.choice('FBIW')}{draw.randint(0, 21)}")
