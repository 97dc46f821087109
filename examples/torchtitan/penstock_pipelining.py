"""A `pipelining_fn` for torchtitan's ModelSpec: its stages, run by Penstock's schedules.

    spec = dataclasses.replace(spec, pipelining_fn=penstock_pipeline)

torchtitan cuts the model and applies what else it does to each part; the schedule that it made is then replaced.
"""

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm

from penstock.compat.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class
from penstock.compat.pipelining.schedules import _PipelineScheduleRuntime


def penstock_pipeline(model: Any, *, parallelism: Any, **given: Any) -> tuple[Any, list[Any], bool, bool]:
    """What torchtitan's `pipeline_llm` returns, with Penstock's schedule in the place of torch's."""
    theirs, parts, has_first, has_last = pipeline_llm(model, parallelism=parallelism, **given)
    stages = [
        PipelineStage(
            stage.submod,
            stage.stage_index,
            stage.num_stages,
            stage.device,
            group=stage.group,
            get_mesh=stage._mesh_cache._get_mesh_cb,  # of DTensors that cross between stages
        )
        for stage in getattr(theirs, "_stages", None) or [theirs._stage]
    ]
    file = parallelism.pipeline_parallel_schedule_csv
    kind: Any = _PipelineScheduleRuntime if file else get_schedule_class(parallelism.pipeline_parallel_schedule)
    ours = kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        n_microbatches=theirs._n_microbatches,
        loss_fn=theirs._loss_fn,
        scale_grads=theirs.scale_grads,
    )
    if file:
        ours._load_csv(file)
    return ours, parts, has_first, has_last
