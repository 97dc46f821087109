"""Penstock: pipeline-parallel training for PyTorch, with the schedule as a value.

The names below load torch only when they are first used, so that `penstock.schedule` works,
and starts fast, without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.tool import tool

if TYPE_CHECKING:
    from penstock.checkpoint.checkpointer import Checkpointer as Checkpointer
    from penstock.checkpoint.files.pretrained import PretrainedFolder as PretrainedFolder
    from penstock.checkpoint.load.loading import Loaded as Loaded
    from penstock.checkpoint.single import load as load
    from penstock.checkpoint.single import save as save
    from penstock.compat.gpipe.gpipe import GPipe as GPipe
    from penstock.model.by_position import Routed as Routed
    from penstock.model.cut_options import CutOptions as CutOptions
    from penstock.model.lazy import lazy as lazy
    from penstock.parallel.mesh import mesh as mesh
    from penstock.parallel.parallel_options import ParallelOptions as ParallelOptions
    from penstock.parallel.sampler import ReplicaSampler as ReplicaSampler
    from penstock.parallel.tensor_parallel.tensor_plan import TensorPlan as TensorPlan
    from penstock.pipeline import Pipeline as Pipeline
    from penstock.pipeline import StepResult as StepResult
    from penstock.planner.plan import plan as plan
    from penstock.runtime.batch.batch_options import BatchOptions as BatchOptions
    from penstock.runtime.batch.lengths import by_tokens as by_tokens
    from penstock.runtime.batch.microbatch import Microbatches as Microbatches
    from penstock.runtime.batch.microbatch import Shared as Shared
    from penstock.runtime.loss.add_loss import add_loss as add_loss
    from penstock.runtime.loss.loss_options import LossOptions as LossOptions
    from penstock.runtime.optim.groups import parameter_groups as parameter_groups
    from penstock.runtime.optim.scaler import GradScaler as GradScaler
    from penstock.runtime.state.batch_norm import defer_batch_norm as defer_batch_norm
    from penstock.runtime.state.batch_norm import exact_batch_norm as exact_batch_norm
    from penstock.runtime.state.batch_norm import restore_batch_norm as restore_batch_norm
    from penstock.runtime.state.phase import current_microbatch as current_microbatch
    from penstock.runtime.state.phase import is_checkpointing as is_checkpointing
    from penstock.runtime.state.phase import is_recomputing as is_recomputing
    from penstock.runtime.state.randomness import randomness as randomness
    from penstock.tools.parity_check.parity import parity as parity
    from penstock.tools.rehearsal.rehearse import rehearse as rehearse
    from penstock.tools.rehearsal.training import rehearse_training as rehearse_training

__version__ = "0.1.0"

_HOMES = {  # what is public, and the module that has it
    "BatchOptions": "penstock.runtime.batch.batch_options",
    "Checkpointer": "penstock.checkpoint.checkpointer",
    "CutOptions": "penstock.model.cut_options",
    "GPipe": "penstock.compat.gpipe.gpipe",
    "GradScaler": "penstock.runtime.optim.scaler",
    "Loaded": "penstock.checkpoint.load.loading",
    "LossOptions": "penstock.runtime.loss.loss_options",
    "Microbatches": "penstock.runtime.batch.microbatch",
    "ParallelOptions": "penstock.parallel.parallel_options",
    "Pipeline": "penstock.pipeline",
    "PretrainedFolder": "penstock.checkpoint.files.pretrained",
    "ReplicaSampler": "penstock.parallel.sampler",
    "Routed": "penstock.model.by_position",
    "Shared": "penstock.runtime.batch.microbatch",
    "StepResult": "penstock.pipeline",
    "TensorPlan": "penstock.parallel.tensor_parallel.tensor_plan",
    "add_loss": "penstock.runtime.loss.add_loss",
    "by_tokens": "penstock.runtime.batch.lengths",
    "current_microbatch": "penstock.runtime.state.phase",
    "defer_batch_norm": "penstock.runtime.state.batch_norm",
    "exact_batch_norm": "penstock.runtime.state.batch_norm",
    "is_checkpointing": "penstock.runtime.state.phase",
    "is_recomputing": "penstock.runtime.state.phase",
    "lazy": "penstock.model.lazy",
    "load": "penstock.checkpoint.single",
    "mesh": "penstock.parallel.mesh",
    "parameter_groups": "penstock.runtime.optim.groups",
    "parity": "penstock.tools.parity_check.parity",
    "plan": "penstock.planner.plan",
    "randomness": "penstock.runtime.state.randomness",
    "rehearse": "penstock.tools.rehearsal.rehearse",
    "rehearse_training": "penstock.tools.rehearsal.training",
    "restore_batch_norm": "penstock.runtime.state.batch_norm",
    "save": "penstock.checkpoint.single",
}
_ROOMS = ("errors", "schedule")  # modules that are found without an import of their own

__all__ = sorted(["__version__", *_HOMES])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return tool(f"penstock.{name}", f"penstock.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(tool(home, f"penstock.{name}"), name)


def __dir__() -> list[str]:
    return __all__
