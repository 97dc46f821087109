"""Checkpoints of a run in Penstock's own format: each process writes its part, and nothing is put together in memory.

Lightning's own files have all of a model in one; that is the default, and they load anywhere. This one is for models
whose state should not be on one rank: a folder that is whole or not there, of JSON and safetensors, which loads into
any layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.io import CheckpointIO

from penstock.checkpoint.single import load, save
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.integrations.lightning.strategy import PipelineStrategy

PARTS = ("state_dict", "optimizer_states")  # Each process writes these by itself.


class PipelineCheckpointIO(CheckpointIO):
    """Saves a Lightning run in Penstock's own format: a folder to which each process writes its own part.

    `PipelineStrategy(checkpoint_io=PipelineCheckpointIO())`.
    """

    strategy: PipelineStrategy | None = None  # puts itself here

    def _here(self) -> PipelineStrategy:
        if self.strategy is None:
            raise UsageError("a PipelineCheckpointIO works with a PipelineStrategy: pass it as its checkpoint_io=")
        return self.strategy

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save on every process; the checkpoint is whole when this returns."""
        if storage_options is not None:
            raise UsageError("a PipelineCheckpointIO takes no storage_options")
        strategy = self._here()
        extra = {name: value for name, value in checkpoint.items() if name not in PARTS}
        save(path, strategy.pipe, strategy.bare_optimizers(), step=checkpoint["global_step"], extra=extra)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load on every process, into its stages and optimizers; return the rest."""
        strategy = self._here()
        loaded = load(path, strategy.pipe, strategy.bare_optimizers() or None)
        return {**loaded.extra, **{name: [] for name in PARTS}}

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, on one process."""
        shutil.rmtree(Path(path))
