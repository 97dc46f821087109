"""A `pipelining_fn` for torchtitan's ModelSpec: its stages, run by Penstock's schedules.

    spec = dataclasses.replace(spec, pipelining_fn=penstock_pipeline)

torchtitan cuts the model and applies what else it does to each part; the schedule that it made is then replaced.
"""

from typing import Any

from torchtitan.distributed.pipeline_parallel import pipeline_llm

from penstock.compat.pipelining import PipelineScheduleMulti, PipelineStage, get_schedule_class


class MicrobatchSchedule:
    """A schedule that is called as torchtitan's trainer does, with a batch that is split already."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(
        self,
        *,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        loss_kwargs: Any = None,
        return_outputs: bool = False,
    ) -> Any:
        return self.schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


def penstock_pipeline(model: Any, *, parallelism: Any, training: Any, **given: Any) -> tuple[Any, Any, bool, bool]:
    """What torchtitan's `pipeline_llm` returns, with Penstock's schedule of the same name in the place of torch's."""
    theirs, parts, has_first, has_last = pipeline_llm(model, parallelism=parallelism, training=training, **given)
    stages = [
        PipelineStage(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group)
        for stage in getattr(theirs, "_stages", None) or [theirs._stage]
    ]
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    ours = kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        n_microbatches=microbatches,
        loss_fn=theirs._loss_fn,
        scale_grads=False,
    )
    return MicrobatchSchedule(ours), parts, has_first, has_last
