"""What torch's schedule classes have in common: an order, the pipeline that it becomes, `step` and `eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.compat.pipelining.actions import Orders, check_order, orders_of, schedule_of
from penstock.compat.pipelining.chunks import CustomFunctions
from penstock.compat.pipelining.errors import ArgumentTypeError, InvalidOrder, UnsupportedFormat
from penstock.compat.pipelining.failures import in_its_grid
from penstock.compat.pipelining.microbatch import as_arguments, batch_dims, one_each
from penstock.compat.pipelining.stage import _PipelineStageBase, all_stages
from penstock.compat.pipelining.translated import Translated, custom_handler, weight_handlers
from penstock.errors import RunError, UsageError
from penstock.model.original.wrapped import wrappings
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import Shared
from penstock.runtime.loss.loss_options import LossOptions
from penstock.schedule import Op, Schedule, build, insert_reductions, lower
from penstock.schedule.files.text import from_csv, rows_to_csv

__all__ = ["_PipelineSchedule"]

Format = Literal["compute_only", "compute_comms"]
WINDOW = 3  # stages that are whole at a time, where sharding is asked for


class _PipelineSchedule(CustomFunctions):
    """Stages and an order; the first step makes the pipeline. `options` are further arguments of `Pipeline`."""

    family: str | None = None  # in penstock.schedule; None where the order comes from elsewhere
    _use_full_backward: bool | None = None  # False: in the order, B is the backward for the inputs alone

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        if not stages or not all(isinstance(stage, _PipelineStageBase) for stage in stages):
            raise UsageError(f"{type(self).__name__} takes the PipelineStages of this rank; got {stages!r}")
        super().__init__()
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self.options: dict[str, Any] = {}
        self._given_ranks: dict[int, int] | None = None  # of stages, where they were said
        self._all_stages = list(stages)
        self._num_stages = stages[0].num_stages
        self.pp_group_size, self.rank = stages[0].group_size, stages[0].group_rank
        self.pipeline_order: dict[int, list[Any]] = {}
        self._with_comms: dict[int, list[Any]] | None = None
        self._functions: dict[Op, Callable[..., None]] = {}
        self._pipe: Translated | None = None
        if self.family is not None:
            self.pipeline_order = orders_of(self._built(self.family))
            self._tell_stages(self.stage_index_to_group_rank)

    def _built(self, family: str) -> Schedule:
        per_rank, left = divmod(self._num_stages, self.pp_group_size)
        if left or per_rank != len(self._all_stages):
            raise UsageError(
                f"{type(self).__name__}: {self._num_stages} stages on {self.pp_group_size} ranks are "
                f"{self._num_stages / self.pp_group_size:g} per rank, but this rank has {len(self._all_stages)}; give "
                f"each rank the same number"
            )
        return build(family, self.pp_group_size, self._n_microbatches, per_rank)

    # -- the order

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Any]]:
        if self._with_comms is not None:
            return self._with_comms
        return orders_of(lower(self._schedule()))

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, orders: dict[int, list[Any]]) -> None:
        self._with_comms = orders

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        return dict(enumerate(self._schedule().placement))

    def _tell_stages(self, placed: dict[int, int]) -> None:
        for stage in self._all_stages:
            stage.stage_index_to_group_rank = placed

    def _schedule(self) -> Schedule:
        """What runs: the order as it stands now, or with the transfers that it was given."""
        orders: Orders = self.pipeline_order if self._with_comms is None else self._with_comms
        if not orders:
            raise UsageError(f"{type(self).__name__} has no order yet; set pipeline_order, or call _load_csv(file)")
        schedule = self._read(orders)
        return schedule if self._with_comms is None else schedule.replace(passes=("transfers",))

    def _read(self, orders: Orders) -> Schedule:
        """An order as a schedule, by what `use_full_backward` says about its `B`."""
        name = self.family or type(self).__name__
        full = self._use_full_backward is not False
        schedule = schedule_of(orders, self._n_microbatches, name, full_backward=full)
        if self._use_full_backward and any(action.op in (Op.I, Op.W) for _, _, action in schedule.parts()):
            raise InvalidOrder(
                "use_full_backward=True, but the order has backwards in two halves, I and W; leave it out, or pass "
                "False if B is the backward for the inputs alone"
            )
        return schedule

    def _load_csv(self, filename: str, format: Format = "compute_only") -> None:
        """Take the order of a file, torch's or one that `penstock` wrote, and prove at once that it can run.

        A file in torch's older notation for zero bubble, `0F0,0B0,0W0`, is read by a schedule that was made with
        `use_full_backward=False`.
        """
        found = from_csv(Path(filename).read_text(), {"microbatches": self._n_microbatches})
        self._prepare_schedule_with_comms(orders_of(found), format)

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], format: Format = "compute_only") -> None:
        if format not in ("compute_only", "compute_comms"):
            raise UnsupportedFormat(f"format={format!r} is not implemented: choose 'compute_only' or 'compute_comms'")
        schedule = self._read(actions)
        if format == "compute_only" and schedule.passes:
            rank, place, action = next(each for each in schedule.parts() if not each[2].op.is_compute)
            raise UsageError(
                f"Expected compute-only schedule but found communication action '{action}' at rank {rank}, position "
                f"{place}; pass format='compute_comms' for an order that has its transfers"
            )
        check_order(schedule, self.pp_group_size, self._num_stages)
        self._check_ranks(schedule)
        self._forget_pipe()
        actions = orders_of(schedule)
        if format == "compute_comms":
            self._with_comms = actions
        else:
            self.pipeline_order, self._with_comms = actions, None
        self._tell_stages(dict(enumerate(schedule.placement)))

    _load_actions = _prepare_schedule_with_comms  # its older name

    def _dump_csv(self, filename: str, format: Format = "compute_comms") -> None:
        """Write the order, in the dialect that torch and `penstock` read."""
        schedule = self._schedule()
        if format == "compute_comms" and self._with_comms is None:
            schedule = lower(schedule)
        elif format == "compute_only":
            schedule = schedule.compute()
        Path(filename).write_text(rows_to_csv(schedule.rows))

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
            self._forget_pipe()  # its order gets such actions
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

    def _forget_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def close(self) -> None:
        """End what the pipeline holds; the next step would make a new one."""
        self._forget_pipe()

    def _made(self) -> Translated:
        first = self._all_stages[0]
        modules: Any
        modules, spread = all_stages(self._all_stages, self._check, self._trains())
        schedule = self._schedule()
        options, wrapped = self.options, False
        if first.pipe is not None:
            wrapped = any(wrappings(module) for module in modules)  # which the modules that run know nothing of
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
            loss_options=LossOptions(reduction="mean" if self.scale_grads else "sum", per_microbatch=True),
            group=None if "mesh" in self.options else first.group,
            devices=None if first.device.type == "cpu" else [first.device] * schedule.ranks,
            **options,
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
        return pipe

    def _check(self) -> None:
        """Each stage of this rank is where the order runs it."""
        schedule = self._schedule()
        mine = sorted(stage.stage_index for stage in self._all_stages)
        if schedule.stages != self._num_stages or schedule.ranks != self.pp_group_size:
            raise UsageError(
                f"the order is for {schedule.stages} stages on {schedule.ranks} ranks, but there are "
                f"{self._num_stages} on {self.pp_group_size}"
            )
        self._check_ranks(schedule)
        self._tell_stages(dict(enumerate(schedule.placement)))
        wanted = sorted(schedule.placement.stages_of(self.rank))
        if mine != wanted:
            raise UsageError(f"the order runs stages {wanted} on rank {self.rank}, but it was given stages {mine}")

    def _check_ranks(self, schedule: Schedule) -> None:
        """A placement that was passed must be the order's: the order decides."""
        placed = dict(enumerate(schedule.placement))
        for stage, rank in ({} if self._given_ranks is None else self._given_ranks).items():
            if placed.get(stage) != rank:
                raise UsageError(
                    f"stage_index_to_group_rank has stage {stage} on rank {rank}, but the order runs it on "
                    f"{f'rank {placed[stage]}' if stage in placed else 'no rank'}; give both the same placement"
                )

    # -- running it

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward for a batch, or only forward without a `loss_fn`.

        Args:
            *args: Positional inputs, on the rank of the first stage.
            target: The target, on the rank of the last stage.
            losses: A list that is filled with one loss per microbatch.
            return_outputs: Whether to return the output.
            loss_kwargs: Further keyword arguments of the loss function.
            **kwargs: Keyword inputs.

        Returns:
            The output on the rank of the last stage.
        """
        if not self._trains():
            if target is not None or losses is not None:
                raise RunError(
                    "Forward-only schedule does not support loss computation: it was made without a loss_fn, or is "
                    "for inference; leave target= and losses= out"
                )
            return self._run(False, args, kwargs, None, None, True, None)
        if not torch.is_grad_enabled():
            raise RunError(
                "step() requires gradients to be enabled for backward computation; it should not be used under "
                "torch.no_grad() context. Please call eval() instead."
            )
        return self._run(True, args, kwargs, target, losses, return_outputs, loss_kwargs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run only forward, in eval mode, without touching what training uses.

        Args:
            *args: Positional inputs, on the rank of the first stage.
            target: The target, on the rank of the last stage.
            losses: A list that is filled with one loss per microbatch.
            loss_kwargs: Further keyword arguments of the loss function.
            **kwargs: Keyword inputs.
        """
        return self._run(False, args, kwargs, target, losses, True, loss_kwargs)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """A step on microbatches that are split already."""
        args, kwargs, target = as_arguments(self._n_microbatches, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(self._trains(), args, kwargs, target, losses, return_outputs, loss_kwargs)

    def _trains(self) -> bool:
        """Whether `step` has a backward."""
        return self._loss_fn is not None and self.family != "forward-only"

    def _run(
        self,
        training: bool,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        if losses is not None and not isinstance(losses, list):
            raise ArgumentTypeError(f"losses must be a list but got a {type(losses).__name__}; they are put into it")
        pipe = self.pipeline
        has_first = any(stage.is_first for stage in self._all_stages)
        if not has_first and pipe.batches.options.inputs == "first":
            args, kwargs = (), {}
        self.backward_counter.clear()
        for stage in self._all_stages:
            stage.has_backward = training
            stage.clear_runtime_states()
        pipe.batches.dims = batch_dims(args, kwargs, self._args_chunk_spec, self._kwargs_chunk_spec)
        args, kwargs = one_each(self._n_microbatches, args, kwargs, target, pipe.batches.dims)
        extra = {name: Shared(value) for name, value in (loss_kwargs or {}).items()}  # each loss gets it whole
        run = pipe.step if training else pipe.evaluate
        with in_its_grid(type(self).__name__, pipe.program if training else None):
            result = run(*args, target=target, loss_kwargs=extra, outputs=return_outputs, **kwargs)
        last = next((stage for stage in self._all_stages if stage.is_last), None)
        if last is None:
            return None
        last.output_chunks = pipe.batches.taken()
        if losses is not None:
            found: tuple[Tensor, ...] = result.losses
            losses[:] = [loss.to(last.device) for loss in found]
        return result.output
