"""torch's schedule classes: which family of `penstock.schedule` each is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.compat.pipelining.actions import (
    _Action,
    _ComputationType,
    _format_pipeline_order,
    _PipelineContext,
    _validate_schedule,
    check_order,
)
from penstock.compat.pipelining.base import _PipelineSchedule
from penstock.compat.pipelining.chunks import _wait_batch_p2p
from penstock.compat.pipelining.stage import _PipelineStageBase
from penstock.errors import UsageError

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleFlexibleInterleaved1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_Action",
    "_ComputationType",
    "_PipelineContext",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "_format_pipeline_order",
    "_validate_schedule",
    "_wait_batch_p2p",
    "get_schedule_class",
]

FORWARD, FULL_BACKWARD = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = _ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
UNSHARD, RESHARD, REDUCE_GRAD = _ComputationType.UNSHARD, _ComputationType.RESHARD, _ComputationType.REDUCE_GRAD
SEND_F, RECV_F = _ComputationType.SEND_F, _ComputationType.RECV_F
SEND_B, RECV_B = _ComputationType.SEND_B, _ComputationType.RECV_B
F, I, W, B = FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD


class PipelineScheduleSingle(_PipelineSchedule):
    """The base of schedules with one stage per rank.

    Args:
        stage: The stage of this rank.
        n_microbatches: Number of microbatches.
        loss_fn: A function of (output, target) that returns the loss.
        args_chunk_spec: How positional inputs are split: one `TensorChunkSpec` each.
        kwargs_chunk_spec: How keyword inputs are split.
        output_merge_spec: How outputs of microbatches are joined.
        scale_grads: Whether gradients are divided by the number of microbatches, as torch does for mean losses.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__([stage], n_microbatches, loss_fn, specs, scale_grads)
        self._stage = stage


class PipelineScheduleMulti(_PipelineSchedule):
    """The base of schedules with several stages per rank.

    Args:
        stages: The stages of this rank.
        n_microbatches: Number of microbatches.
        loss_fn: A function of (output, target) that returns the loss.
        args_chunk_spec: How positional inputs are split: one `TensorChunkSpec` each.
        kwargs_chunk_spec: How keyword inputs are split.
        output_merge_spec: How outputs of microbatches are joined.
        scale_grads: Whether gradients are divided by the number of microbatches, as torch does for mean losses.
        use_full_backward: `False` says that the order is in torch's older notation for zero bubble, in which `B` is the
            backward for the inputs alone.
        backward_requires_autograd: Changes nothing here.
        defer_pp_recv: Changes nothing here: receives are always posted early.
        stage_index_to_group_rank: The rank of each stage. It must agree with the order, which decides.
    """

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        stage_index_to_group_rank: dict[int, int] | None = None,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, specs, scale_grads)
        self._given_ranks = stage_index_to_group_rank
        self._use_full_backward = use_full_backward
        self._stages = self._all_stages
        self.n_local_stages = len(self._stages)

    def _validate_and_set_stage_mapping(self, actions: dict[int, list[Any]]) -> None:
        """Prove the order and inform the stages: torch's schedule classes end their constructors with this."""
        schedule = self._read(actions)
        check_order(schedule, self.pp_group_size, self._num_stages)
        self._tell_stages(dict(enumerate(schedule.placement)))


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """One whose order comes from a file or from actions."""


class _Family(_PipelineScheduleRuntime):
    """Several stages per rank, in an order of its own."""

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads=scale_grads)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    family = "forward-only"


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    family = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward."""

    family = "1f1b"


class ScheduleInterleaved1F1B(_Family):
    """Several stages per rank, depth first; any number of microbatches."""

    family = "interleaved-1f1b"


class ScheduleFlexibleInterleaved1F1B(ScheduleInterleaved1F1B):
    """The same as `ScheduleInterleaved1F1B`: any number of microbatches works.

    Args:
        *args: As of `ScheduleInterleaved1F1B`.
        enable_zero_bubble: Whether to use the zero-bubble order instead.
        **kwargs: As of `ScheduleInterleaved1F1B`.
    """

    def __init__(self, *args: Any, enable_zero_bubble: bool = False, **kwargs: Any) -> None:
        if enable_zero_bubble:
            self.family = ScheduleInterleavedZeroBubble.family
        super().__init__(*args, **kwargs)


class ScheduleLoopedBFS(_PipelineScheduleRuntime):
    """Several stages per rank, breadth first.

    Args:
        stages: The stages of this rank.
        n_microbatches: Number of microbatches.
        loss_fn: A function of (output, target) that returns the loss.
        args_chunk_spec: How positional inputs are split: one `TensorChunkSpec` each.
        kwargs_chunk_spec: How keyword inputs are split.
        output_merge_spec: How outputs of microbatches are joined.
        scale_grads: Whether gradients are divided by the number of microbatches, as torch does for mean losses.
        backward_requires_autograd: Changes nothing here.
        defer_pp_recv: Changes nothing here: receives are always posted early.
    """

    family = "looped-bfs"

    def __init__(
        self,
        stages: Sequence[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads=scale_grads)


class ScheduleInterleavedZeroBubble(_Family):
    """The interleaved order with weight gradients in its bubbles."""

    family = "interleaved-zb"


class ScheduleZBVZeroBubble(_Family):
    """Two stages per rank, placed as a V: rank r has stages r and 2 * ranks - 1 - r."""

    family = "zb-v"


class ScheduleDualPipeV(_Family):
    """Two stages per rank, placed as a V, with overlapped pairs; fewer microbatches than stages are fine."""

    family = "dualpipe-v"


def get_schedule_class(schedule_name: str) -> type[_PipelineSchedule]:
    """Return the schedule class of that name, in any case.

    Args:
        schedule_name: The name, such as `"1F1B"` or `"Interleaved1F1B"`.
    """
    classes: dict[str, type[_PipelineSchedule]] = {
        "1F1B": Schedule1F1B,
        "Interleaved1F1B": ScheduleInterleaved1F1B,
        "FlexibleInterleaved1F1B": ScheduleFlexibleInterleaved1F1B,
        "GPipe": ScheduleGPipe,
        "LoopedBFS": ScheduleLoopedBFS,
        "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
        "PipelineScheduleSingle": PipelineScheduleSingle,
        "PipelineScheduleMulti": PipelineScheduleMulti,
        "ZBVZeroBubble": ScheduleZBVZeroBubble,
        "DualPipeV": ScheduleDualPipeV,
    }
    by_name = {name.lower(): found for name, found in classes.items()}
    if not isinstance(schedule_name, str) or schedule_name.lower() not in by_name:
        raise UsageError(f"Unknown schedule name {schedule_name!r}. The valid options are {list(classes)}")
    return by_name[schedule_name.lower()]
