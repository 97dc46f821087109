"""torch's names for actions, by the text that both notations share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple

from penstock.compat.pipelining.errors import InvalidAction, InvalidOrder
from penstock.errors import NotationError, PeerFailure, ScheduleError, UsageError
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op, Schedule, verify

ROWS_AROUND = 6  # rows of the grid before the failing one, and after it
PAIR = -1  # the stage of an overlapped pair: its halves have stages


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
        try:
            return _ComputationType(action)
        except ValueError:
            raise InvalidAction(f"Invalid computation type {action}") from None


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
        """Read an action; None for an idle slot. `2F`, without a microbatch, is an action too, but cannot be run."""
        text = action_string.strip()
        if not text:
            return None
        if bare := re.fullmatch(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)", text):
            return _Action(int(bare[1]), _ComputationType(bare[2]))
        try:
            return _of(Action.parse(text))
        except NotationError as error:
            raise InvalidAction(
                f"Invalid action string: {text}, should be formatted as [stage][action type][(microbatch)] e.g. 2F0 "
                f"({error})"
            ) from None


Orders = Mapping[int, Sequence[Any]]  # Indexed by rank; actions are ours or torch's, or None.


def _of(action: Action) -> _Action:
    kind = _ComputationType(str(action.op))
    if action.pair is not None:
        return _Action(PAIR, kind, None, tuple(_of(part) for part in action.pair))
    return _Action(action.stage, kind, action.microbatch)


def orders_of(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """Return a schedule as torch keeps it."""
    return {rank: [None if each is None else _of(each) for each in row] for rank, row in enumerate(schedule.rows)}


def schedule_of(orders: Orders, microbatches: int | None, name: str, *, full_backward: bool = True) -> Schedule:
    """Make a schedule of what torch keeps.

    Without `full_backward` it is in torch's older notation for zero bubble, in which `B` is the backward for the
    inputs alone, and `I` here.
    """

    def action(text: str) -> Action | None:
        return Action.parse(text if full_backward else re.sub(r"(?<=\d)B(?=\d)", "I", text)) if text else None

    rows = [[action("" if each is None else str(each)) for each in orders[rank]] for rank in sorted(orders)]
    try:
        return Schedule(rows, microbatches=microbatches, name=name)
    except ScheduleError as error:
        raise InvalidOrder(error.faults) from None


def _format_pipeline_order(pipeline_order: Orders, error_step_number: int | None = None) -> str:
    """Draw the order as a grid: a row per time step, a column per rank, under the rank's own number."""
    return grid(pipeline_order, error_step_number) + "\n"


def grid(
    orders: Orders, error_step: int | None = None, error_rank: int | None = None, around: int | None = None
) -> str:
    """Draw an order. The failing step's row is marked, and in it the failing rank's cell, as `[1F0]`.

    `around` leaves all rows out but so many before and after the failing step.
    """
    ranks = sorted(orders)
    table = [["" if each is None else str(each) for each in orders[rank]] for rank in ranks]
    if error_step is not None and error_rank in ranks:
        row = table[ranks.index(error_rank)]
        if error_step < len(row):
            row[error_step] = f"[{row[error_step]}]"
    steps = list(zip_longest(*table, fillvalue=""))
    digits = len(str(max(len(steps) - 1, 0)))
    heads = [f"Rank {rank}" for rank in ranks]
    widths = [max(len(head), *(map(len, column)), 0) for head, column in zip(heads, table, strict=True)]

    def line(label: str, cells: Sequence[str]) -> str:
        columns = " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"{label} {columns}".rstrip()

    first, last = 0, len(steps)
    if around is not None and error_step is not None:
        first, last = max(0, error_step - around), min(len(steps), error_step + around + 1)
    lines = [line(" " * (len("Step :") + digits), heads)]
    for number in range(first, last):
        mark = " <-- ERROR HERE" if number == error_step else ""
        lines.append(line(f"Step {number:0{digits}}:", steps[number]) + mark)
    return "\n".join(lines)


@contextmanager
def failures_in_grid(name: str, program: Schedule | None) -> Iterator[None]:
    """Add a note to a failure inside: the schedule's name, and the rows of the program around the failing action."""
    try:
        yield
    except PeerFailure as error:
        row = program.rows[error.rank] if program is not None and error.rank < program.ranks else ()
        actions = [(step, action) for step, action in enumerate(row) if action is not None]
        whole = (step for step, action in actions if str(action) == error.action)
        parts = (step for step, action in actions if error.action in [str(part) for part in action.parts()])
        step = next(whole, next(parts, None))
        if program is None or step is None:
            error.add_note(f"{name} was running")
        else:
            marked = grid(orders_of(program), step, error.rank, ROWS_AROUND)
            error.add_note(f"{name} failed at step {step} of rank {error.rank}, action {error.action}:\n{marked}")
        raise


def check_sizes(schedule: Schedule, ranks: int, stages: int) -> None:
    """Refuse an order for other numbers of ranks and stages."""
    if (schedule.ranks, schedule.stages) != (ranks, stages):
        raise InvalidOrder(
            f"the order is for {schedule.stages} stages on {schedule.ranks} ranks, but there are {stages} on {ranks}"
        )


def check_order(schedule: Schedule, ranks: int, stages: int) -> None:
    """Prove that an order runs everything once, for so many ranks and stages, and that it can end."""
    check_sizes(schedule, ranks, stages)
    try:
        verify(schedule)
    except ScheduleError as error:
        raise InvalidOrder(error.faults) from None


def _validate_schedule(actions: Orders, pp_group_size: int, num_stages: int, num_microbatches: int) -> dict[int, int]:
    """Prove that the order runs everything once, in an order that can end; which rank each stage is on."""
    schedule = schedule_of(actions, num_microbatches, "")
    check_order(schedule, pp_group_size, num_stages)
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
        self._context.run(Action.parse(str(action)))

    def fetch(self, action: _Action) -> None:
        """Wait until everything that the computes of the action need is on this rank."""
        self._context.fetch(Action.parse(str(action)))

    def compute(self, action: _Action) -> None:
        self._context.compute(Action.parse(str(action)))

    @property
    def _context(self) -> Context:
        if self.context is None:
            raise UsageError("this context was made by hand, outside of a step: it runs nothing")
        return self.context
