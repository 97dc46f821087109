"""`transformers.Trainer` on a pipeline: `pip install 'penstock[transformers]'`."""

from penstock.integrations.transformers.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
