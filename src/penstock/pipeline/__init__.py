"""`Pipeline`, the face of Penstock, and what it is composed of.

construction   how arguments become stages on ranks
deployment     the model's stages laid out on ranks, their schedules, and who runs them
batches        a call's arguments as what each rank computes on, and reports as a result
steps          what surrounds a step;  train_steps: steps that overlap
model_state/   the model's values that this process owns, under the model's own names
"""

from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.engine.report import StepResult

__all__ = ["Pipeline", "StepResult"]
