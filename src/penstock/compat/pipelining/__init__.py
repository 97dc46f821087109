"""The names of `torch.distributed.pipelining`, on top of `Pipeline`: change the import, and go on.

A thin translation. A stage is kept as it is given; the first `step` or `eval` makes a `Pipeline` of all ranks' stages,
and from then on a step here is a step there. What torch gets wrong is right because `Pipeline` is;
docs/guides/coming-from.md lists it.
"""

from penstock.compat.pipelining.microbatch import TensorChunkSpec
from penstock.compat.pipelining.pipe import Pipe, SplitPoint, build_stage, pipe_split, pipeline
from penstock.compat.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleFlexibleInterleaved1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    get_schedule_class,
)
from penstock.compat.pipelining.stage import PipelineStage

__all__ = [
    "Pipe",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleFlexibleInterleaved1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "_ScheduleForwardOnly",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
]
