"""A run beside its prediction: what was wrong and by how much, and which plans are best now that it is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.calibration import RecordedRun, from_run, read_run
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.plan import stated_cluster
from penstock.planner.plans import Plan, Plans, plan_document, plans_document, ranking_table
from penstock.planner.profile import PENSTOCK
from penstock.planner.ranking import make_plan, rank_plans
from penstock.planner.writing import priced_settings
from penstock.rules import is_float
from penstock.schedule.files.drawing import table
from penstock.tools.train.run.memory import KINDS
from penstock.view.figures import percent, time_text


@dataclass(frozen=True)
class Comparison:
    """A run beside its prediction; figures by name: seconds, the idle share, bytes of the fullest rank."""

    plan: Plan  # What was run, with what a plan says of it.
    measured: dict[str, float]
    predicted: dict[str, float]
    plans: Plans  # What is best, now that the run is known.
    basis: str  # What the prediction is from, in words.
    spread: float | None  # The spread of the run's steps, see RecordedRun.

    @property
    def errors(self) -> dict[str, float]:
        """By name: (predicted - measured) / measured; of the idle share, which is one already, the difference."""
        return {
            name: self.predicted[name] - value if name == "idle" else self.predicted[name] / value - 1
            for name, value in self.measured.items()
            if value
        }


def compare_run(path: str | Path, cluster: Cluster | str | Path | None = None, *, trust: bool = False) -> Comparison:
    """Compare a run with its prediction, and plan again with what it has shown.

    The prediction is what the stated cluster says of the run; without one, what was saved with its plan.
    """
    run, known = read_run(path, trust=trust), stated_cluster(cluster)
    profile = profile_config(run.config, PENSTOCK if known is None else known.software)
    calibrated = from_run(run, profile, known)
    before = known or calibrated
    candidate = run.candidate(profile, before)
    plan = make_plan(run.config, candidate, profile, before)
    predicted = {**plan.figures, "step": run.predicted_seconds(candidate)}
    saved, basis = _saved(run)
    if known is not None:
        basis = f"predicted on {known.name}"
        del predicted["process"]  # What libraries take on another machine is not known.
    elif saved is not None:
        predicted = saved
    measured = {"step": run.seconds}
    if run.timeline is not None:
        measured |= {"makespan": run.timeline.makespan, "idle": run.timeline.bubble}
    for kind in (*KINDS, "tensors", "process"):
        held = [each[kind] for each in run.memory if each.get(kind) is not None]
        if held:
            measured[kind] = max(held)
    measured = {name: value for name, value in measured.items() if name in predicted}
    return Comparison(plan, measured, predicted, rank_plans(run.config, profile, calibrated), basis, run.spread)


def _saved(run: RecordedRun) -> tuple[dict[str, float] | None, str]:
    """Return what was predicted when the run was planned, where that was this configuration; and what is compared."""
    itself = "the efficiency is the one that predicts this run's own step, whose error says nothing"
    saved = dict(run.config.prediction)
    if not saved:
        return None, f"no prediction was saved with this configuration and no --cluster is stated: {itself}"
    is_of_this = saved.pop("of", None) == priced_settings(run.config)
    if not is_of_this or "step" not in saved or not all(map(is_float, saved.values())):
        return None, f"the prediction that was saved is not of this configuration: {itself}"
    return saved, "predicted when it was planned"


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Return a comparison for a program."""
    figures = {name: getattr(found, name) for name in ("predicted", "measured", "basis", "spread", "errors")}
    return {"plan": plan_document(found.plan), **figures, "next": plans_document(found.plans)}


def comparison_text(found: Comparison) -> str:
    """Return a comparison as tables and sentences."""
    errors = found.errors
    rows = [("", "predicted", "measured", "error")]
    for name, value in found.measured.items():
        error = _error_text(name, errors[name]) if name in errors else ""
        rows.append((name, _figure(name, found.predicted[name]), _figure(name, value), error))
    worst = max(errors, key=lambda name: abs(errors[name]))
    spread = "the run has too few steps to tell by how much they differ"
    if found.spread is not None:
        spread = f"the run's own steps differ by {found.spread:.0%} from their median"
    furthest = f"furthest off: {worst}, by {_error_text(worst, errors[worst])}"
    lines = [table(rows, left=[0]), "", found.basis, spread, furthest]
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
