"""Plans as values: what a run has to choose, what it is predicted to cost, and what was left out; also as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from penstock.errors import UsageError
from penstock.planner.cluster import Cluster
from penstock.planner.layout import MeshLayout
from penstock.schedule import Schedule
from penstock.schedule.files.drawing import table
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.memory import Memory, memory_document
from penstock.view.figures import bytes_text, percent, time_text

LISTED = 6  # layouts that were left out and are listed as text


@dataclass(frozen=True)
class Plan:
    """One plan: a layout and everything else that a run has to choose, with what it is predicted to cost.

    Attributes:
        layout: The axes.
        family: The schedule's family, or `"searched"`.
        stages: Number of stages, over all ranks.
        microbatches: Microbatches per step and replica.
        rows: Rows of a microbatch.
        recompute: Whether forwards run again in the backward.
        cuts: The names of the modules that stages 1, 2, ... begin with.
        counts: How many pieces of the model each stage has.
        seconds: Predicted time of a step.
        error: How far that may be off, as a share.
        tokens_per_second: Tokens trained per second.
        mfu: Model FLOP/s, as a share of the devices' peak.
        idle: Share of the ranks' time in the pipeline that they wait.
        memory: Bytes of each rank of a pipeline, by kind.
        shares: Where the time of a step goes, by name: seconds.
        config: The configuration that was planned for.
        by_position: Whether the model is a sequence that is cut by counts.
        build_schedule: The function that makes the schedule.
    """

    layout: MeshLayout
    family: str
    stages: int
    microbatches: int
    rows: int
    recompute: bool
    cuts: tuple[str, ...]
    counts: tuple[int, ...]
    seconds: float
    error: float
    tokens_per_second: float
    mfu: float
    idle: float
    memory: tuple[Memory, ...]
    shares: dict[str, float]
    config: TrainConfig
    by_position: bool
    build_schedule: Callable[[], Schedule]

    @property
    def peak(self) -> Memory:
        """The memory of the fullest rank."""
        return max(self.memory, key=lambda each: each.process)

    @property
    def figures(self) -> dict[str, float]:
        """What a run can be compared with, by name: seconds, the idle share, bytes of the fullest process by kind."""
        after = self.shares["reduction"] + self.shares["update"]
        rows = [asdict(each) for each in self.memory]
        in_threads = self.config.pipeline.workers == "threads"  # All ranks are in one process then.
        most = {kind: (sum if in_threads else max)(row[kind] for row in rows) for kind in rows[0]}
        return {"step": self.seconds, "makespan": self.seconds - after, "idle": self.idle, **most}

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule itself, built when it is first asked for."""
        return self.build_schedule()

    def pipeline_arguments(self) -> dict[str, object]:
        """Return what `Pipeline(plan=...)` takes from it."""
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "recompute": "always" if self.recompute else "never",
            **({"balance": list(self.counts)} if self.by_position else {"split_at": list(self.cuts)}),
        }


@dataclass(frozen=True)
class Rejected:
    """A layout that was left out, and why."""

    layout: MeshLayout
    why: str


@dataclass(frozen=True)
class Plans:
    """What a model can be run as on a cluster, the fastest first: one plan per layout.

    Attributes:
        ranked: The plans.
        rejected: Layouts that were left out.
        advice: What limits the best one, in words.
        cluster: What they are for.
        parameters: Numbers in the model's parameters.
    """

    ranked: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    advice: tuple[str, ...]
    cluster: Cluster
    parameters: float

    @property
    def best(self) -> Plan:
        """The fastest."""
        if not self.ranked:
            raise UsageError(_no_plan(self))
        return self.ranked[0]


def _no_plan(plans: Plans) -> str:
    worst = [f"  {each.layout}: {each.why}" for each in plans.rejected[:5]]
    remedy = (
        "what helps: more devices, or more memory on each (device.memory); a smaller optimizer (optimizer.name=sgd or "
        "adamw8bit); shorter rows (--sequence)"
    )
    if len(plans.rejected) > 1 and all(each.layout.pp == each.layout.tp == 1 for each in plans.rejected):
        worst.append("  pp > 1: it has no nn.Sequential or nn.ModuleList of layers to cut between, or one with too few")
    model = f"this model of {_count_text(plans.parameters)} parameters"
    return "\n".join([f"no layout of {plans.cluster.world} devices can train {model}:", *worst, remedy])


def _count_text(count: float) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:,.0f}"


# -- as text


def plans_text(plans: Plans) -> str:
    """Format the ranking, the memory of the fullest ranks, what limits the best, and why others were left out."""
    cluster = plans.cluster
    head = (
        f"{_count_text(plans.parameters)} parameters on {cluster.hosts} x {cluster.devices} devices "
        f"({cluster.name}), {bytes_text(cluster.device.memory)} each, of which "
        f"{cluster.device.headroom:.0%} stay free"
    )
    if not plans.ranked:
        return "\n".join([head, "", _no_plan(plans)])
    lines = [head, "", ranking_table(plans.ranked), "", _memory_table(plans.ranked), ""]
    lines += [f"{plans.best.layout}: {words}" for words in plans.advice]
    if plans.rejected:
        lines += ["", f"left out, {len(plans.rejected)} layouts:"]
        lines += [f"  {each.layout}: {each.why}" for each in plans.rejected[:LISTED]]
    if len(plans.rejected) > LISTED:
        lines.append(f"  and {len(plans.rejected) - LISTED} more (--json lists all)")
    return "\n".join(lines)


def ranking_table(plans: Sequence[Plan]) -> str:
    """Draw one line per plan."""
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


def _memory_table(plans: Sequence[Plan]) -> str:
    kinds = [field.name for field in fields(Memory)]
    rows = [
        [str(number), *(bytes_text(getattr(plan.peak, kind)) for kind in kinds)] for number, plan in enumerate(plans, 1)
    ]
    return table([["", *kinds], *rows])


# -- for programs


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a document."""
    names = ("stages", "microbatches", "recompute", "seconds", "error", "tokens_per_second", "mfu", "idle", "shares")
    return {
        "layout": asdict(plan.layout),
        "schedule": plan.family,
        "rows_per_microbatch": plan.rows,
        "split_at": list(plan.cuts),
        "counts": list(plan.counts),
        "memory": memory_document(plan.memory),
        **{name: getattr(plan, name) for name in names},
    }


def plans_document(plans: Plans) -> dict[str, Any]:
    """Return all plans as a document."""
    return {
        "cluster": asdict(plans.cluster),
        "parameters": plans.parameters,
        "plans": [plan_document(each) for each in plans.ranked],
        "limits": list(plans.advice),
        "rejected": [{"layout": asdict(each.layout), "why": each.why} for each in plans.rejected],
    }
