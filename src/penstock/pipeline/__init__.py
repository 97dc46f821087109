"""`Pipeline`, the face of Penstock, and what it is composed of.

deployment   the model's stages laid out on ranks, and who runs them
programs     the schedule for each number of microbatches, lowered and proved
batches      a call's arguments as what each rank computes on, and reports as a result
state        the model's values that this process owns, under the model's own names
"""

from penstock.pipeline.pipeline import Pipeline
from penstock.runtime.engine.report import StepResult

__all__ = ["Pipeline", "StepResult"]
