"""What torch's schedule classes have in common: an order, the pipeline that it becomes, `step` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.compat.pipelining.actions import check_sizes, failures_in_grid, orders_of
from penstock.compat.pipelining.chunks import CustomFunctions
from penstock.compat.pipelining.errors import ArgumentTypeError
from penstock.compat.pipelining.microbatch import as_arguments, batch_dims, check_specs, one_each
from penstock.compat.pipelining.order import Ordered
from penstock.compat.pipelining.stage import _PipelineStageBase, all_stages
from penstock.compat.pipelining.translated import (
    MEANS,
    SUMS,
    Translated,
    check_options,
    custom_handler,
    weight_handlers,
)
from penstock.errors import PenstockError, RunError, UsageError
from penstock.model.original.wrappers import wrappings
from penstock.rules import check_count
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import Shared
from penstock.schedule import FAMILIES, Op, insert_reductions, lower

WINDOW = 3  # stages that are whole at a time, where sharding is asked for
StepArguments = tuple[Sequence[Any], Mapping[str, Any], Any]  # positional and keyword arguments, and the target
Microbatched = tuple[list[Any] | None, list[Any] | None, list[Any] | None]  # the same, one per microbatch


class _PipelineSchedule(Ordered, CustomFunctions):
    """Stages and an order; the first step makes the pipeline. `options` are further arguments of `Pipeline`."""

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None,
        specs: tuple[Any, Any, Any],  # Specs of positional inputs, of keyword inputs and of outputs.
        scale_grads: bool,
    ) -> None:
        own = list(stages) if isinstance(stages, Sequence) else []
        if not own or not all(isinstance(stage, _PipelineStageBase) for stage in own):
            raise UsageError(f"{type(self).__name__} takes the PipelineStages of this rank; got {stages!r}")
        check_count("n_microbatches", n_microbatches)
        if loss_fn is not None and not callable(loss_fn):
            raise UsageError(f"loss_fn={loss_fn!r}: pass a function of (output, target), such as F.mse_loss")
        check_specs(*specs[:2])
        Ordered.__init__(self, own)
        CustomFunctions.__init__(self)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec = specs
        self.scale_grads = scale_grads
        self.options: dict[str, Any] = {}
        self._functions: dict[Op, Callable[..., None]] = {}
        self._pipe: Translated | None = None
        self._made_of: list[Any] = []  # the modules of this rank's stages in the pipeline
        if self.family is not None:
            self.pipeline_order = orders_of(self._built(self.family))
            self._tell_stages(self.stage_index_to_group_rank)

    def register_custom_function(self, computation_type: Any, custom_function: Callable[[Any, Any], None]) -> None:
        """Run `custom_function(action, ctx)` in the place of that kind of action."""
        try:
            op = Op[str(computation_type)]
        except KeyError:
            op = Op.SEND_F
        if op.is_transfer:
            raise UsageError(
                f"Invalid computation type {computation_type}. Only FORWARD, FULL_BACKWARD, BACKWARD_INPUT, "
                f"BACKWARD_WEIGHT, OVERLAP_F_B, UNSHARD, RESHARD and REDUCE_GRAD are supported."
            )
        built = [stage.stage_index for stage in self._all_stages if stage.dw_builder is not None]
        if built and op is not Op.F and not op.is_sharding:
            raise UsageError(f"stages {built} have a dw_builder, which a custom function for {op} would leave out")
        if op.is_sharding and op not in self._functions:
            self.close()  # The order of the pipeline gets such actions.
        self._functions[op] = custom_function
        if self._pipe is not None:
            self._pipe.register(op, custom_handler(self, custom_function))

    # -- the pipeline

    @property
    def pipeline(self) -> Translated:
        """The `penstock.Pipeline` behind this schedule; all ranks make it together."""
        if self._pipe is None:
            self._pipe = self._made()
        return self._pipe

    def close(self) -> None:
        """End what the pipeline holds; the next step would make a new one."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _made(self) -> Translated:
        first = self._all_stages[0]
        modules: Any
        modules, spread = all_stages(self._all_stages, self._check, self._trains())
        schedule = self._schedule()
        check_options(self.options)
        options, wrapped = self.options, False
        if first.pipe is not None:
            wrapped = any(wrappings(module) for module in modules)  # The modules that run do not know it.
            modules = first.pipe.model
            split = replace(options.get("batch_options", BatchOptions()), inputs="first")
            options = {**first.pipe.cut, "keep_model": True, **options, "batch_options": split}
            if not schedule.passes:
                schedule = schedule.replace(topology=first.pipe.split.topology)
        if self._with_comms is None and any(op.is_sharding for op in self._functions):
            schedule = lower(schedule, reduce=True, window=WINDOW)
        elif wrapped:
            schedule = lower(schedule, reduce=True) if self._with_comms is None else insert_reductions(schedule)
        pipe = Translated(
            modules,
            schedule=schedule,
            loss_fn=self._loss_fn,
            group=None if "mesh" in self.options else first.group,
            **{
                "loss_options": MEANS if self.scale_grads else SUMS,
                "devices": None if first.device.type == "cpu" else [first.device] * schedule.ranks,
                **options,
            },
        )
        pipe.batches.output_merge_spec = self._output_merge_spec
        if wrapped:
            pipe.drive_wrapped({stage.stage_index: stage.submod for stage in self._all_stages})
        if spread and "mesh" not in self.options:
            pipe.carry_spread(self._all_stages)
        handlers = weight_handlers(self._all_stages)
        handlers |= {op: custom_handler(self, function) for op, function in self._functions.items()}
        for op, handler in handlers.items():
            pipe.register(op, handler)
        self._made_of = [stage.submod for stage in self._all_stages]
        return pipe

    def _check(self) -> None:
        """Check that each stage of this rank is where the order runs it."""
        schedule = self._schedule()
        mine = sorted(stage.stage_index for stage in self._all_stages)
        check_sizes(schedule, self.pp_group_size, self._num_stages)
        self._check_ranks(schedule)
        self._tell_stages(dict(enumerate(schedule.placement)))
        due = sorted(schedule.placement.stages_of(self.rank))
        if mine != due:
            raise UsageError(f"the order runs stages {due} on rank {self.rank}, but it was given stages {mine}")

    # -- running it

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward for a batch, or only forward without a `loss_fn`.

        Args:
            *args: Positional inputs, on the rank of the first stage.
            target: The target, on the rank of the last stage.
            losses: A list that is filled with one loss per microbatch.
            return_outputs: Whether to return the output.
            loss_kwargs: Further keyword arguments of the loss function.
            arg_mbs: Instead of `*args`, a tuple of them per microbatch.
            kwarg_mbs: Instead of `**kwargs`, a dict of them per microbatch.
            target_mbs: Instead of `target`, one per microbatch.
            **kwargs: Keyword inputs.

        Returns:
            The output on the rank of the last stage.
        """
        split = (arg_mbs, kwarg_mbs, target_mbs)
        return self._run("step", (args, kwargs, target), split, losses, loss_kwargs, return_outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run only forward, in eval mode, without touching what training uses. The arguments are those of `step`."""
        split = (arg_mbs, kwarg_mbs, target_mbs)
        return self._run("eval", (args, kwargs, target), split, losses, loss_kwargs, True)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a step on microbatches that are split already."""
        split = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        return self.step(losses=losses, return_outputs=return_outputs, loss_kwargs=loss_kwargs, **split)

    def _trains(self) -> bool:
        """Return whether `step` has a backward."""
        return self._loss_fn is not None and (self.family is None or FAMILIES[self.family].trains)

    def _run(
        self,
        call: str,
        whole: StepArguments,
        split: Microbatched,
        losses: list[Any] | None,
        loss_kwargs: dict[str, Any] | None,
        return_outputs: bool,
    ) -> Any:
        pipe, training = self.pipeline, call == "step" and self._trains()
        self.backward_counter.clear()
        for stage in self._all_stages:
            stage.has_backward = training
            stage.clear_runtime_states()
        try:
            args, kwargs, target = self._prepared(call, whole, split, losses, loss_kwargs)
        except PenstockError as refusal:  # raised in the step, so that the other ranks hear of it
            pipe.batches.refusal = refusal
            args, kwargs, target, loss_kwargs = (), {}, None, None
        extra = {name: Shared(value) for name, value in (loss_kwargs or {}).items()}  # each loss gets it whole
        run = pipe.step if training else pipe.evaluate
        with failures_in_grid(type(self).__name__, pipe.program if training else None):
            result = run(*args, target=target, loss_kwargs=extra, outputs=return_outputs, **kwargs)
        last = next((stage for stage in self._all_stages if stage.is_last), None)
        if last is None:
            return None
        last.output_chunks = pipe.batches.taken()
        if losses is not None:
            found: tuple[Tensor, ...] = result.losses
            losses[:] = [loss.to(last.device) for loss in found]
        return result.output

    def _check_step(self, wants_loss: bool) -> None:
        if not self._trains() and wants_loss:
            raise RunError(
                "Forward-only schedule does not support loss computation: it was made without a loss_fn, or is "
                "for inference; leave target= and losses= out"
            )
        if self._trains() and not torch.is_grad_enabled():
            raise RunError(
                "step() requires gradients to be enabled for backward computation; it should not be used under "
                "torch.no_grad() context. Please call eval() instead."
            )

    def _prepared(
        self, call: str, whole: StepArguments, split: Microbatched, losses: Any, loss_kwargs: Any
    ) -> StepArguments:
        """Prepare the pipeline's arguments on this rank, of a batch or one that is split; refuse what cannot run."""
        batches = self.pipeline.batches
        batches.dims = {}
        args, kwargs, target = whole
        if call == "step":
            self._check_step(target is not None or split[2] is not None or losses is not None)
        if any(each is not None for each in split):
            if args or kwargs or target is not None:
                raise UsageError("pass a batch, or its microbatches as arg_mbs, kwarg_mbs and target_mbs, but not both")
            args, kwargs, target = as_arguments(self._n_microbatches, *split)
        if losses is not None and not isinstance(losses, list):
            raise ArgumentTypeError(f"losses must be a list but got a {type(losses).__name__}; they are put into it")
        if loss_kwargs is not None and not isinstance(loss_kwargs, Mapping):
            raise ArgumentTypeError(f"loss_kwargs is a {type(loss_kwargs).__name__}; pass a dict of arguments by name")
        for stage, module in zip(self._all_stages, self._made_of, strict=True):
            if stage.submod is not module:
                raise UsageError(
                    f"stage {stage.stage_index} has another submod than at the schedule's first step; call close() on "
                    f"every rank to have the pipeline made again, or load values into the module that is there"
                )
        if batches.options.inputs == "first" and not any(stage.is_first for stage in self._all_stages):
            args, kwargs = (), {}
        batches.dims = batch_dims(args, kwargs, self._args_chunk_spec, self._kwargs_chunk_spec)
        return *one_each(self._n_microbatches, args, kwargs, target, batches.dims), target
