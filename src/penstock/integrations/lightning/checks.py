"""What a pipeline and Lightning cannot both do: refused before anything is built, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from penstock.errors import UsageError

GIVEN = {
    "model": "the LightningModule is cut",
    "loss_fn": "training_step returns the loss",
    "precision": "Trainer(precision='bf16-mixed') says it",
    "group": "all processes are in it",
    "mesh": "pass replicas=2 for two pipelines",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the pipeline that are not the user's to set here."""
    for name, reason in GIVEN.items():
        if name in options:
            raise UsageError(f"PipelineStrategy({name}=...): leave it out; {reason}")


def check_use(module: LightningModule, trainer: Trainer) -> None:
    """Refuse ways of training that would be ignored, or would break the pipeline."""
    rules = [
        (not module.automatic_optimization, "automatic_optimization=False: the pipeline runs forward and backward"),
        (type(module).backward is not LightningModule.backward, "backward() is overridden: the pipeline's own runs"),
        (getattr(trainer.precision_plugin, "scaler", None) is not None, "precision='16-mixed': its loss scaling is "
         "not joined over ranks here; use 'bf16-mixed'"),
        (getattr(trainer.strategy, "_layer_sync", None) is not None, "sync_batchnorm=True: pass batch_options=penstock."
         "BatchOptions(batch_norm='exact') to the strategy"),
        (getattr(module, "_compiler_ctx", None) is not None, "the module is compiled: compile submodules instead"),
    ]  # fmt: skip
    wrong = [text for is_wrong, text in rules if is_wrong]
    if wrong:
        raise UsageError("a PipelineStrategy cannot train like this:\n  " + "\n  ".join(wrong))
