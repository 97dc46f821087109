"""What a rank does, as lines of `logging` at DEBUG; where that is off, nothing of this file runs.

logging.getLogger("penstock").setLevel(logging.DEBUG)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.schedule import Op, Schedule, align

LOG = logging.getLogger("penstock.actions")


def log_program(program: Schedule, rank: int) -> None:
    """What is about to run: its name and size, the phases of this rank, its transfers and its idle slots."""
    row = [part for action in program.rows[rank] if action is not None for part in action.parts()]
    computes = [part.op for part in row if part.op.is_compute]
    forwards = [place for place, op in enumerate(computes) if op is Op.F]
    backwards = [place for place, op in enumerate(computes) if op is not Op.F]
    warm_up = backwards[0] if backwards else len(computes)
    cool_down = len(computes) - 1 - forwards[-1] if forwards and backwards else 0
    transfers = [part for part in row if part.op.is_transfer]
    LOG.debug(
        "rank %d runs %s: %d ranks, %d stages, %d microbatches; warm-up of %d forwards, %d computes in turn, cool-down "
        "of %d backwards; %d sends and %d receives; %d idle slots",
        rank,
        program.name or "a schedule without a name",
        program.ranks,
        program.stages,
        program.microbatches,
        warm_up,
        len(computes) - warm_up - cool_down,
        cool_down,
        sum(part.op in (Op.SEND_F, Op.SEND_B) for part in transfers),
        sum(part.op in (Op.RECV_F, Op.RECV_B) for part in transfers),
        sum(slot is None for slot in align(program).rows[rank]),
    )


def logged(function: Callable[[Any, Any], Any], line: str) -> Callable[[Any, Any], Any]:
    """The same function, which logs a line before it runs."""

    def run(first: Any, second: Any) -> Any:
        LOG.debug("%s", line)
        return function(first, second)

    return run
