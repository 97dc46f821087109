"""A run beside its prediction: what was wrong and by how much, and which plans are best now that it is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.calibration import KINDS, from_run, read_run
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.plan import cluster_for
from penstock.planner.plans import Plan, Plans
from penstock.planner.ranking import make_plan, rank_plans
from penstock.planner.text import plan_document, plans_document, ranking_table
from penstock.view.figures import percent, table, time_text


@dataclass(frozen=True)
class Comparison:
    """A run beside its prediction; figures by name: seconds, the idle share, bytes of the fullest rank."""

    plan: Plan  # what was run, with what a plan says of it
    measured: dict[str, float]
    predicted: dict[str, float]
    plans: Plans  # what is best, now that the run is known
    is_calibrated_by_itself: bool  # no cluster was stated, so the efficiency is that of the run

    @property
    def errors(self) -> dict[str, float]:
        """By name: (predicted - measured) / measured; of the idle share, which is one already, the difference."""
        return {
            name: self.predicted[name] - value if name == "idle" else self.predicted[name] / value - 1
            for name, value in self.measured.items()
            if value
        }


def compare_run(path: str | Path, cluster: Cluster | str | Path | None = None) -> Comparison:
    """Compare a run with its prediction, and plan again with what it has shown."""
    run = read_run(path)
    known = cluster_for(cluster, run, run.config)
    profile = profile_config(run.config, known.software)
    calibrated = from_run(run, profile, known)
    before = calibrated if cluster is None else known
    candidate = run.candidate(profile, before)
    plan = make_plan(run.config, candidate, profile, before)
    measured, predicted = {"step": run.seconds}, {"step": run.predicted_seconds(candidate)}
    if run.timeline is not None:
        measured |= {"makespan": run.timeline.makespan, "idle": run.timeline.bubble}
        predicted |= {"makespan": candidate.priced[0], "idle": plan.idle}
    for kind in (*KINDS, "process"):
        held = [each[kind] for each in run.memory if each.get(kind) is not None]
        if held and (kind != "process" or cluster is None):  # of another machine, it is not known what libraries take
            ranks = [getattr(each, kind) for each in plan.memory]
            in_threads = run.config.pipeline.workers == "threads"  # all ranks are in one process
            measured[kind], predicted[kind] = max(held), sum(ranks) if in_threads else max(ranks)
    return Comparison(plan, measured, predicted, rank_plans(run.config, profile, calibrated), cluster is None)


def comparison_document(found: Comparison) -> dict[str, Any]:
    """A comparison for a program."""
    return {
        "predicted": plan_document(found.plan),
        "measured": found.measured,
        "errors": found.errors,
        "next": plans_document(found.plans),
    }


def comparison_text(found: Comparison) -> str:
    """A comparison as tables and sentences."""
    errors = found.errors
    rows = [("", "predicted", "measured", "error")]
    for name, value in found.measured.items():
        error = _error_text(name, errors[name]) if name in errors else ""
        rows.append((name, _figure(name, found.predicted[name]), _figure(name, value), error))
    worst = max(errors, key=lambda name: abs(errors[name]))
    lines = [table(rows, left=[0]), "", f"furthest off: {worst}, by {_error_text(worst, errors[worst])}"]
    if found.is_calibrated_by_itself:
        lines.append(
            "without --cluster, the efficiency is the one that predicts this run's own step: its error says nothing"
        )
    if not found.plans.ranked:
        return "\n".join([*lines, "", "no plan fits"])
    efficiency = found.plans.cluster.device.efficiency
    lines += ["", f"with the efficiency that the run has shown, {efficiency:.3f} of the peak:", ""]
    lines += [ranking_table(found.plans.ranked[:3]), ""]
    others = [each for each in found.plans.ranked if each.layout != found.plan.layout] or found.plans.ranked
    best, now = others[0], found.measured["step"]
    change = f"{abs(best.seconds / now - 1):.0%} {'less' if best.seconds < now else 'more'} than this run"
    lines.append(f"next best: {best.layout}, {best.family}: {time_text(best.seconds, 's')} predicted, {change}")
    return "\n".join(lines)


def _figure(name: str, value: float) -> str:
    if name == "idle":
        return percent(value)
    return time_text(value, "s") if name in ("step", "makespan") else f"{value / 1e6:,.1f} MB"


def _error_text(name: str, error: float) -> str:
    return f"{100 * error:+.1f} {'points' if name == 'idle' else '%'}"
