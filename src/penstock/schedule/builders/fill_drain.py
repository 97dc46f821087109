"""Schedules that run all forwards first: gpipe, looped-bfs, forward-only.

Simple, with the largest memory: every microbatch of a rank is in flight when the first
backward starts.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, in_order, trusted
from penstock.schedule.builders.one_f_one_b import in_rounds


def gpipe(ranks: int, microbatches: int) -> list[list[Action]]:
    """Fill, then drain: all forwards, then all backwards, microbatches in order."""
    return [
        [*in_order(rank, Op.F, range(microbatches)), *in_order(rank, Op.B, range(microbatches))]
        for rank in range(ranks)
    ]


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Build an order that is breadth first: all microbatches through one stage before the next; backward mirrors it."""
    forwards = forward_only(ranks, microbatches, stages_per_rank)
    return [row + [trusted(action.stage, Op.B, action.microbatch) for action in reversed(row)] for row in forwards]


def forward_only(ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Build the order of inference: all microbatches through each stage, breadth first."""
    owned = [range(rank, ranks * stages_per_rank, ranks) for rank in range(ranks)]
    return [in_rounds(stages, Op.F, [microbatches]) for stages in owned]
