"""Everything that a checkpoint holds of one process, gathered while training stands still."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.checkpoint.generators import states_of_generators
from penstock.checkpoint.named_tensors import AVERAGE, Saved, optimizers_of
from penstock.errors import UsageError
from penstock.runtime.messages.plain import encode

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


@dataclass(frozen=True)
class Given:
    """What the user passed beside the pipeline."""

    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    extra: Any = None
    config: Any = None
    averages: Mapping[str, Tensor] | None = None
    score: float | None = None
    while_best: bool = False
    # Whether to leave out a parameter of this name, because it comes from elsewhere.
    leave_out: Callable[[str], bool] | None = None


def collect(pipe: Pipeline, given: Given, process: int) -> Saved:
    """Collect tensors (not copied yet) and plain values (copied) of this process."""
    pipe.state.check_values()
    saved = Saved()
    saved.add_model(pipe, given.leave_out)
    optimizers = optimizers_of(given.optimizer)
    if optimizers:
        saved.add_optimizers(pipe, optimizers)
    saved.tensors |= {f"{AVERAGE}{name}": value.detach() for name, value in (given.averages or {}).items()}
    owner = f"process-{process:05d}."
    saved.plain["generators"] = saved.add("generators", states_of_generators(), "the random generators", owner)
    for name in ("data", "scheduler", "scaler") if process == 0 else ("data",):
        holder = getattr(given, name)
        if holder is not None:
            check_stateful(holder, name)
            whose = owner if name == "data" else ""
            saved.plain[name] = saved.add(name, holder.state_dict(), f"{name}.state_dict()", whose)
    if process == 0:
        clock = pipe.deployment.counter
        saved.plain["clock"] = {"seed": clock.seed, "step": clock.step, "evaluations": clock.evaluations}
        saved.plain["extra"] = saved.add("extra", given.extra, "extra")
    return saved


def check_stateful(holder: Any, name: str) -> None:
    """Check that an object can give its state, and take it back."""
    if not callable(getattr(holder, "state_dict", None)) or not callable(getattr(holder, "load_state_dict", None)):
        raise UsageError(
            f"{name}={type(holder).__name__}: pass an object with state_dict() and load_state_dict(state), or use "
            f"extra= for plain values"
        )


def layout_of(pipe: Pipeline, processes: int) -> dict[str, Any]:
    """Describe how the run that saves is laid out."""
    schedule = pipe.schedule
    return {
        "processes": processes,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "placement": [schedule.placement.rank_of(stage) for stage in range(schedule.stages)],
        "schedule": schedule.name or "its own",
        "microbatches": schedule.microbatches,
        "replicas": pipe.deployment.replication.replicas,
        "replicate": pipe.composition.replicate,
        "tp": pipe.composition.axes.size("tp"),
    }


def document_of(step: int, pipe: Pipeline, given: Given, processes: int) -> dict[str, Any]:
    """Make the manifest, but for its files and number."""

    def refuse(tensor: torch.Tensor) -> str:
        raise UsageError("config= holds a tensor; put tensors into extra=")

    return {
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": encode(given.config, refuse, "config"),
        "layout": layout_of(pipe, processes),
        "versions": {
            "penstock": sys.modules["penstock"].__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "origin": pipe.deployment.staged.origin,
        "score": given.score,
        "while_best": given.while_best,
    }
