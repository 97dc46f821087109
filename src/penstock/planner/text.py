"""Plans in words, as tables and as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from penstock.planner.plans import Plan, Plans, count_text, no_plan
from penstock.schedule.files.drawing import table
from penstock.tools.train.run.memory import Memory, memory_document
from penstock.view.figures import bytes_text, percent, time_text

KINDS = tuple(field.name for field in fields(Memory))


def plans_text(plans: Plans, most: int = 10, rejected: int = 6) -> str:
    """The ranking, memory of the fullest rank by kind, what limits the best, and why others were left out."""
    cluster = plans.cluster
    lines = [
        f"{count_text(plans.parameters)} parameters on {cluster.hosts} x {cluster.devices} devices "
        f"({cluster.name}), {bytes_text(cluster.device.memory)} each, of which "
        f"{cluster.device.headroom:.0%} stay free",
        "",
    ]
    if not plans.ranked:
        return "\n".join([*lines, no_plan(plans)])
    lines += [ranking_table(plans.ranked[:most]), "", memory_table(plans.ranked[:most]), ""]
    lines += [f"{plans.best.layout}: {words}" for words in plans.advice]
    if plans.rejected:
        lines += ["", f"left out, {len(plans.rejected)} layouts:"]
        lines += [f"  {each.layout}: {each.why}" for each in plans.rejected[:rejected]]
        if len(plans.rejected) > rejected:
            lines.append(f"  and {len(plans.rejected) - rejected} more (--json lists all)")
    return "\n".join(lines)


def ranking_table(plans: Sequence[Plan]) -> str:
    """One line per plan."""
    rows = [
        {
            "": str(number),
            "layout": str(plan.layout),
            "schedule": plan.family,
            "stages": str(plan.stages),
            "microbatches": f"{plan.microbatches} of {plan.rows}",
            "recompute": "yes" if plan.recompute else "no",
            "step": time_text(plan.seconds, "s"),
            "+-": time_text(plan.seconds * plan.error, "s"),
            "tokens/s": f"{plan.tokens_per_second:,.0f}",
            "mfu": percent(plan.mfu),
            "idle": percent(plan.idle),
            "memory": bytes_text(plan.peak.process),
        }
        for number, plan in enumerate(plans, 1)
    ]
    return table([tuple(rows[0]), *(tuple(row.values()) for row in rows)], left=[1, 2])


def memory_table(plans: Sequence[Plan]) -> str:
    """What the fullest rank of each plan holds, by kind."""
    rows = [("", *KINDS)]
    for number, plan in enumerate(plans, 1):
        rows.append((str(number), *(bytes_text(getattr(plan.peak, kind)) for kind in KINDS)))
    return table(rows)


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan for a program."""
    return {
        "layout": asdict(plan.layout),
        "schedule": plan.family,
        "stages": plan.stages,
        "microbatches": plan.microbatches,
        "rows_per_microbatch": plan.rows,
        "recompute": plan.recompute,
        "split_at": list(plan.cuts),
        "counts": list(plan.counts),
        "seconds": plan.seconds,
        "error": plan.error,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "idle": plan.idle,
        "shares": plan.shares,
        "memory": memory_document(plan.memory),
    }


def plans_document(plans: Plans) -> dict[str, Any]:
    """All plans for a program."""
    return {
        "cluster": asdict(plans.cluster),
        "parameters": plans.parameters,
        "plans": [plan_document(each) for each in plans.ranked],
        "limits": list(plans.advice),
        "rejected": [{"layout": asdict(each.layout), "why": each.why} for each in plans.rejected],
    }
