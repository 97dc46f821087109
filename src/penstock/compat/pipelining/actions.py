"""torch's names for actions, by the text that both notations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op, Schedule, verify

__all__ = ["Orders", "orders_of", "schedule_of"]


class _ComputationType(StrEnum):
    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    OVERLAP_B_F = "OVERLAP_B_F"
    REDUCE_GRAD = "REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        """By its text."""
        return _ComputationType(action)


class _Action(NamedTuple):
    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.computation_type}"
        number = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type}{number}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_compute_op(self) -> bool:
        """No transfer and nothing about shards."""
        op = Op[str(self.computation_type)]
        return op.is_compute or op.is_pair

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """By its text; nothing for an idle slot."""
        text = action_string.strip()
        return _of(Action.parse(text)) if text else None


Orders = Mapping[int, Sequence[Any]]  # by rank: actions, ours or torch's, or None


def _of(action: Action) -> _Action:
    parts = None if action.pair is None else tuple(_of(part) for part in action.pair)
    return _Action(action.stage, _ComputationType(str(action.op)), action.microbatch, parts)


def orders_of(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """A schedule as torch keeps it."""
    return {rank: [None if each is None else _of(each) for each in row] for rank, row in enumerate(schedule.rows)}


def schedule_of(orders: Orders, microbatches: int | None, name: str) -> Schedule:
    """What torch keeps, as a schedule."""
    rows = [
        [None if each is None or str(each) == "" else Action.parse(str(each)) for each in orders[rank]]
        for rank in sorted(orders)
    ]
    return Schedule(rows, microbatches=microbatches, name=name)


def _format_pipeline_order(pipeline_order: Orders) -> str:
    """A picture of the order."""
    return schedule_of(pipeline_order, None, "").draw()


def _validate_schedule(actions: Orders, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove that the order runs everything once, in an order that can end; which rank each stage is on."""
    schedule = schedule_of(actions, num_microbatches, "")
    if (schedule.ranks, schedule.stages) != (pp_group_size, num_stages):
        raise UsageError(
            f"the order is for {schedule.stages} stages on {schedule.ranks} ranks, not {num_stages} on {pp_group_size}"
        )
    verify(schedule)
    return {stage: schedule.placement.rank_of(stage) for stage in range(num_stages)}


@dataclass
class _PipelineContext:
    """What a custom function is given; `run`, `fetch` and `compute` are the default ways to do its action."""

    schedule_ref: Any
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None
    context: Context | None = field(default=None, repr=False)

    def run(self, action: _Action) -> None:
        """As if no function were registered."""
        assert self.context is not None
        self.context.run(Action.parse(str(action)))

    def fetch(self, action: _Action) -> None:
        """Wait until everything that the computes of the action need is on this rank."""
        assert self.context is not None
        self.context.fetch(Action.parse(str(action)))

    def compute(self, action: _Action) -> None:
        """Run the computes of the action, in order."""
        assert self.context is not None
        self.context.compute(Action.parse(str(action)))
