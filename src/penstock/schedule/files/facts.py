"""Stated facts against a file: what it must be for.

A fact is never put in the place of what the file says: a file for 4 microbatches that is loaded with
`microbatches=8` is an error that names both numbers. A CSV says less than a JSON file. What it cannot say is
taken from the facts, and its rows must then fit them, which is for the schedule's own checks to see.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import Fault, UsageError
from penstock.rules import check_count
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.seen import forwards_seen, passes_seen
from penstock.schedule.topology import Topology

# Facts that may be passed for a file that cannot state them.
TAKEN = ("placement", "microbatches", "topology", "recompute", "name", "passes")
KNOWN = ("ranks", "stages", "forward_only", *TAKEN)


def taken(facts: dict[str, Any]) -> dict[str, Any]:
    """Return those stated facts that a CSV file takes; raise a UsageError for what is no fact or of no use."""
    odd = sorted(set(facts) - set(KNOWN))
    if odd:
        raise UsageError(f"a schedule has no property {', '.join(odd)}; known: {', '.join(sorted(KNOWN))}")
    for name in ("ranks", "stages", "microbatches"):
        value = facts.get(name)
        if value is not None:
            check_count(name, value)
    topology = facts.get("topology")
    if topology is not None and not isinstance(topology, Topology):
        raise UsageError(f"topology is a Topology, such as Topology(stages, edges); got {topology!r}")
    return {name: facts[name] for name in TAKEN if facts.get(name) is not None}


def check_facts(schedule: Schedule, facts: dict[str, Any], *, whole: bool) -> list[Fault]:
    """Find every stated fact that the file contradicts. A `whole` file, JSON, states all of them."""
    found = _rank_faults(schedule, facts.get("ranks"))
    for name, says in (_said if whole else _seen)(schedule).items():
        stated = facts.get(name)
        if stated is None:
            continue
        if name == "placement" and not isinstance(stated, Placement):
            stated = Placement(stated)
        elif name in ("passes", "recompute"):
            stated = frozenset(stated)
        if stated != says:
            found.append(Fault(f"the file is for {_text(name, says)}, not {_text(name, stated)}"))
    return found


def _rank_faults(schedule: Schedule, ranks: int | None) -> list[Fault]:
    rows = schedule.ranks
    if ranks is None or ranks == rows:
        return []
    if ranks < rows:
        return [Fault(f"the file has {rows} rows, for {ranks} ranks: {rows - ranks} too many")]
    return [Fault(f"has no row in the file, which has {rows}", rank) for rank in range(rows, ranks)]


def _said(schedule: Schedule) -> dict[str, Any]:
    says = {name: getattr(schedule, name) for name in ("stages", "forward_only", *TAKEN)}
    if not schedule.name:  # no name is no statement
        del says["name"]
    return says


def _seen(schedule: Schedule) -> dict[str, Any]:
    """Return what rows of actions show for certain."""
    seen = sorted({part.stage for _, _, part in schedule.parts()})
    says: dict[str, Any] = {"stages": seen[-1] + 1} if seen else {}
    says["forward_only"] = not any(part.op.is_backward for _, _, part in schedule.parts())
    forwards = list(forwards_seen(schedule.rows).values())
    if forwards and all(numbers == set(range(len(forwards[0]))) for numbers in forwards):
        says["microbatches"] = len(forwards[0])
    passes = passes_seen(schedule.ops)
    if not passes <= schedule.passes:
        says["passes"] = passes
    return says


def _text(name: str, value: Any) -> str:
    if name in ("microbatches", "stages"):
        return f"{value} {name if value != 1 else name.removesuffix('es' if name == 'microbatches' else 's')}"
    if name == "topology":
        return f"the edges {' '.join(f'{source}->{target}' for source, target in value.edges)}"
    if name == "recompute":
        return f"recompute of stages {sorted(value)}"
    if name == "passes":
        return f"passes {', '.join(sorted(value)) or 'none'}"
    return f"{name}={value!r}" if name != "placement" else f"placement {value}"
