"""The pipeline behind a schedule: `Pipeline`, with torch's way to join outputs and torch's custom functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.compat.pipelining.actions import _of, _PipelineContext
from penstock.compat.pipelining.chunks import Running
from penstock.compat.pipelining.errors import ArgumentTypeError
from penstock.compat.pipelining.microbatch import merge_chunks, present
from penstock.compat.pipelining.stage import _PipelineStageBase
from penstock.errors import PenstockError, UsageError
from penstock.pipeline import Pipeline
from penstock.pipeline.batches import Batches, Call
from penstock.runtime.batch.fingerprint import FingerprintedBatch
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.engine.handlers import Context, Handler
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.loss.loss_options import LossOptions
from penstock.schedule import Action, Op

MEANS = LossOptions(reduction="mean", per_microbatch=True)  # torch's scale_grads: what it makes of losses
SUMS = LossOptions(reduction="sum", per_microbatch=True)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise if `schedule.options` has something that is no argument of a Pipeline, or that the schedule says itself."""
    own = {"self", "model", "stages", "schedule", "loss_fn", "group"}
    known = [name for name in inspect.signature(Pipeline.__init__).parameters if name not in own]
    for name in options:
        if name not in known:
            why = "the schedule's own" if name in own else "no argument of Pipeline"
            raise UsageError(f"schedule.options has {name!r}, which is {why}; options are {', '.join(known)}")


class TranslatedBatches(Batches):
    """Batches with torch's way to join outputs; keeps each microbatch's output until the schedule takes them."""

    output_merge_spec: Any = None
    refusal: PenstockError | None = None  # why this rank cannot run the step that comes next
    _chunks: Sequence[Any] = ()
    _warned = False

    def uneven(self, what: str) -> None:
        """Warn, once, where torch's gradients are not those of the batch."""
        if not self._warned and any(self.loss_options is each for each in (MEANS, SUMS)):
            self._warned = True
            warnings.warn(
                f"{what}. That is what torch.distributed.pipelining computes; for the loss of the batch set "
                f"schedule.options = {{'loss_options': penstock.LossOptions()}} before the first step",
                stacklevel=2,
            )

    def _split(self, *given: Any, whole: bool = True) -> Batch:
        """Split a batch; its rows are for the end stages to decide: ranks between them may pass any keywords."""
        batch = present(super()._split(*given, whole=whole))
        if not any(index in (0, self.deployment.staged.stages - 1) for index in self.deployment.ranks.modules()):
            batch.rows = None
        return batch

    def _resolve(self, call: Call, count: int) -> dict[int, StepInput]:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        found = super()._resolve(call, count)
        last = self.deployment.ranks.last
        if call.training and last is not None and self.loss_fn is not None and not found[last.rank].batch.has_target:
            raise UsageError(
                f"step() was passed no target on rank {last.rank}, which has the last stage and calls the loss_fn; "
                f"pass target= there"
            )
        return found

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a keyword that no stage of this rank takes: torch gives it to the rank's own stages."""
        own = [self.deployment.staged.parts[index] for index in self.deployment.ranks.modules()]
        for name in kwargs if self.options.inputs == "every" else ():
            if not any(part.takes is None or name in part.takes for part in own):
                stages = ", ".join(str(part.index) for part in own)
                raise ArgumentTypeError(
                    f"step() got an unexpected keyword argument {name!r}: no forward of this rank's stages ({stages}) "
                    f"takes it; pass it on the rank of a stage that does"
                )
        super()._check_keywords(kwargs)

    def _fingerprint(self, call: Call) -> FingerprintedBatch | None:
        """Fingerprint the batch without keyword arguments, which are each rank's own."""
        return super()._fingerprint(replace(call, kwargs={}))

    def _merged(self, outputs: Sequence[Any]) -> Any:
        self._chunks = outputs
        return merge_chunks(outputs, self.output_merge_spec)

    def taken(self) -> list[Any]:
        found, self._chunks = self._chunks, ()
        return list(found)


class Translated(Pipeline):
    """The pipeline behind a schedule of torch's."""

    _batches_type = TranslatedBatches
    batches: TranslatedBatches

    def drive_wrapped(self, wrapped: Mapping[int, nn.Module]) -> None:
        """Let the program say when these wrappers of stages of a `Pipe` reduce: other modules than they wrap run."""
        from penstock.parallel.compose import drive  # loads FSDP

        self.deployment.replication = drive(self, wrapped)

    def carry_spread(self, stages: Sequence[_PipelineStageBase]) -> None:
        """Let DTensors cross between stages, over the meshes that these know."""
        from penstock.parallel.compose import carry_spread  # loads DTensor

        asked = [stage.get_mesh for stage in stages if stage.get_mesh is not None]
        carry_spread(self, [each for stage in stages for each in stage.declared], asked[0] if asked else None)


def custom_handler(schedule: Any, function: Callable[[Any, Any], None]) -> Handler:
    """Turn a function of torch's (action, ctx) into a handler of ours."""

    def handler(action: Action, context: Context) -> None:
        batch, losses = context.batch, context.losses
        torch_context = _PipelineContext(
            schedule, batch.args, batch.kwargs, batch.targets, [losses[number] for number in sorted(losses)], context
        )
        running = Running(action, context)
        for stage in schedule._all_stages:
            stage.running = running
        try:
            function(_of(action), torch_context)
        finally:
            for stage in schedule._all_stages:
                stage.running = None

    return handler


def weight_handlers(stages: Sequence[_PipelineStageBase]) -> dict[Op, Handler]:
    """Return handlers that ask `dw_builder` after each backward for the inputs, and run what it returns with `W`."""
    builders = {stage.stage_index: stage.dw_builder for stage in stages if stage.dw_builder is not None}
    if not builders:
        return {}
    waiting: dict[tuple[int, int], Callable[..., None]] = {}

    def backward(action: Action, context: Context) -> None:
        context.run(action)
        builder = builders.get(action.stage)
        if builder is not None:
            waiting[action.stage, action.microbatch] = builder()
            if action.op is Op.B:
                waiting.pop((action.stage, action.microbatch))()

    def weights(action: Action, context: Context) -> None:
        context.run(action)
        runner = waiting.pop((action.stage, action.microbatch), None)
        if runner is not None:
            runner()

    return {Op.B: backward, Op.I: backward, Op.W: weights}
