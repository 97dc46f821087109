"""Lightning's Trainer on a pipeline: `pip install 'penstock[lightning]'`."""

from penstock.integrations.lightning.checkpoint_io import PipelineCheckpointIO
from penstock.integrations.lightning.strategy import PipelineStrategy

__all__ = ["PipelineCheckpointIO", "PipelineStrategy"]
