"""Schedules on the V placement: zb-v, v-half, v-min.

Rank r owns stage r on the way down the V and stage 2 * ranks - 1 - r on the way up. The first
rank, whose first stage holds each microbatch longest, holds it briefly on its second, and the
last rank halfway on both; so all ranks can carry the same load, and that load can be chosen
(arXiv 2405.15362, "Pipeline Parallelism with Controllable Memory").

A *building block* is the path of one microbatch: how many slots later each of its four passes
starts on the next rank that it visits, and how long it rests at each of the three turns:

              slot 0 1 2 3 4 5 6 7 8 9
    rank 0         F . . . . F I . . . . I       down, up: 1 slot a rank
    rank 1         . F . . F . . I . . I         turns: no rest
    rank 2         . . F F . . . . I I

A rank has six slots of work for a microbatch (F, I and W on two stages), so the block is
repeated every six slots. Two facts make the repeat a good order of F and I:

- It is in the order of one clock, so no rank waits in a circle, whatever the numbers.
- A rank holds its two stages for (down + up + back down + back up) * ranks slots on the first
  rank and 2 * (up + back down) * ranks on the last, in between on the others; a sixth of that
  is how many it holds at once. Steps of 1, 1, 1, 1 hold two thirds of `ranks` stages, a third
  of 1F1B's memory; 1, 2, 1, 2 hold `ranks`, a half; 1, 5, 1, 5 hold 2 * ranks, all of it.

Only the order is kept; the slots are squeezed out, as each action runs as soon as it can, and
`greedy` puts each W where its rank would idle or would hold more than the family's cap.

Whether the four passes of a block fall on different slots modulo six on every rank, and how
few microbatches there can be, depends on the rests; so each family names a few blocks, tries
them all, and keeps the shortest order within its cap.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.builders.greedy import Filled, best, fill_weights

__all__ = ["v_half", "v_min", "zb_v"]

PERIOD = 6  # slots of work that a rank has for one microbatch: F, I and W on two stages


class Block(NamedTuple):
    """One microbatch's path: slots from rank to rank, and rests at the turns."""

    down: int
    up: int
    back_down: int
    back_up: int
    rests: tuple[int, int, int] = (0, 0, 0)  # on the last rank, on the first, on the last again


ZB_V = (Block(1, 5, 1, 5),)
V_HALF = (
    Block(1, 2, 1, 2),
    Block(1, 2, 1, 2, (2, 0, 2)),
    Block(1, 2, 1, 2, (2, 2, 2)),
    Block(1, 2, 2, 1, (2, 0, 2)),
)
V_MIN = (
    Block(1, 1, 1, 1),
    Block(1, 1, 1, 1, (1, 0, 2)),
    Block(1, 1, 1, 1, (1, 1, 1)),
)


def zb_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """Zero bubble in 1F1B's memory: at most `ranks` whole-rank microbatches."""
    return _best(ZB_V, ranks, microbatches, whole=ranks)


def v_half(ranks: int, microbatches: int) -> list[list[Action]]:
    """About half of 1F1B's memory: at most `(ranks + 2) // 2` whole-rank microbatches."""
    return _best(V_HALF, ranks, microbatches, whole=(ranks + 2) // 2)


def v_min(ranks: int, microbatches: int) -> list[list[Action]]:
    """About a third of 1F1B's memory: at most `(ranks + 4) // 3` whole-rank microbatches."""
    return _best(V_MIN, ranks, microbatches, whole=(ranks + 4) // 3)


def _best(blocks: tuple[Block, ...], ranks: int, microbatches: int, whole: int) -> list[list[Action]]:
    """The shortest order that one of the blocks gives, holding at most `whole` microbatches on both stages."""
    return best([_repeat(block, ranks, microbatches, cap=2 * whole) for block in blocks], cap=2 * whole)


def _repeat(block: Block, ranks: int, microbatches: int, cap: int) -> Filled:
    """The order of a block that is repeated for each microbatch, with W filled in."""
    orders = []
    for rank in range(ranks):
        slots = sorted(
            (slot + PERIOD * microbatch, place, stage, op, microbatch)
            for place, (slot, stage, op) in enumerate(_passes(block, rank, ranks))
            for microbatch in range(microbatches)
        )
        orders.append([trusted(stage, op, microbatch) for _, _, stage, op, microbatch in slots])
    return fill_weights(orders, [*range(ranks), *reversed(range(ranks))], cap)


def _passes(block: Block, rank: int, ranks: int) -> list[tuple[int, int, Op]]:
    """The four passes of microbatch 0 on one rank: slot, stage and op."""
    span = ranks - 1  # steps from one end of the pipeline to the other
    turns = [1 + rest for rest in block.rests]
    up_starts = block.down * span + turns[0]
    back_starts = up_starts + block.up * span + turns[1]
    back_up_starts = back_starts + block.back_down * span + turns[2]
    first, second = rank, 2 * ranks - 1 - rank
    return [
        (block.down * rank, first, Op.F),
        (up_starts + block.up * (span - rank), second, Op.F),
        (back_starts + block.back_down * rank, second, Op.I),
        (back_up_starts + block.back_up * (span - rank), first, Op.I),
    ]
