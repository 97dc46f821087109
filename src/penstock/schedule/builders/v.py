"""Schedules on the V placement: zb-v, v-half, v-min.

Rank r owns stage r on the way down the V and stage 2 * ranks - 1 - r on the way up. The first
rank keeps a microbatch longest on its first stage and shortest on its second; the last rank
keeps it equally long on both. So all ranks can carry the same load, and that load can be
chosen (arXiv 2405.15362, "Pipeline Parallelism with Controllable Memory").

A *building block* is the path of one microbatch: how many slots later each of its four legs
starts on the next rank, and how long it rests at each of the three turns. With steps of one
slot and no rest, on three ranks:

    slot     0 1 2 3 4 5 6 7 8 9 10 11
    rank 0   F . . . . F I . . . .  I
    rank 1   . F . . F . . I . . I  .
    rank 2   . . F F . . . . I I .  .

A rank has six slots of work for a microbatch (F, I and W on two stages), so a block is
repeated every six slots. Two facts make the repeated block a good order of F and I:

- All ranks follow one clock, on which each action is later than what it needs. So no ranks
  wait in a circle, whatever the numbers.
- A rank holds a microbatch, counted over both stages, for (down + up + back_down + back_up) *
  ranks slots on the first rank, for 2 * (up + back_down) * ranks on the last, and in between
  on the others. A sixth of that is how many it holds at once: steps of 1, 1, 1, 1 hold two
  thirds of `ranks` stages, which is a third of 1F1B's memory; 1, 2, 1, 2 hold half of it.

Only the order is kept. The slots are squeezed out, as each action runs as soon as it can, and
`filling` puts each W where its rank would idle or would hold more than the family's cap.

The rests decide whether the legs fall on different slots modulo six on every rank, and how
the fill and drain meet the middle; which are best depends on the remainder of `ranks`. So a
family names a few blocks, and takes the shortest order within its cap of these and of the one that
`rhythm.py` makes, which fills faster.

zb-v has memory for more: as in arXiv 2401.10241, each rank runs forwards until its first
gradient can be there, and then goes round F I F I. With equal costs no rank idles between its
first action and its last, given 2 * ranks - 1 microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.builders.dispatch import dispatch
from penstock.schedule.builders.filling import Filled, fill_weights, preference
from penstock.schedule.builders.problem import Problem
from penstock.schedule.builders.rhythm import Rhythm
from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs

LARGE = 100_000  # computes; from here on, making an order by a clock takes long
PERIOD = 6  # slots of work that a rank has for one microbatch: F, I and W on two stages


class VBlock(NamedTuple):
    """One microbatch's path: slots from rank to rank on each leg, and rests at the turns."""

    down: int
    up: int
    back_down: int
    back_up: int
    rests: tuple[int, int, int] = (0, 0, 0)  # On the last rank, on the first, on the last again.


V_HALF = (
    VBlock(1, 2, 1, 2),
    VBlock(1, 2, 1, 2, (2, 0, 2)),
    VBlock(1, 2, 1, 2, (2, 2, 2)),
    VBlock(1, 2, 2, 1, (2, 0, 2)),
)
V_MIN = (
    VBlock(1, 1, 1, 1),
    VBlock(1, 1, 1, 1, (1, 0, 2)),
    VBlock(1, 1, 1, 1, (1, 1, 1)),
)


def v_half(ranks: int, microbatches: int) -> list[list[Action]]:
    """Build an order with about half of 1F1B's memory: at most `(ranks + 2) // 2` whole-rank microbatches."""
    return _best(V_HALF, ranks, microbatches, half_cap(ranks))


def half_cap(ranks: int, stages_per_rank: int = 2) -> int:
    """Return how many stages of microbatches a rank of v-half may hold."""
    return stages_per_rank * ((ranks + 2) // 2)


def v_min(ranks: int, microbatches: int) -> list[list[Action]]:
    """Build an order with about a third of 1F1B's memory: at most `(ranks + 4) // 3` whole-rank microbatches."""
    return _best(V_MIN, ranks, microbatches, min_cap(ranks))


def min_cap(ranks: int, stages_per_rank: int = 2) -> int:
    """Return how many stages of microbatches a rank of v-min may hold."""
    return stages_per_rank * ((ranks + 4) // 3)


def zb_v(ranks: int, microbatches: int, *, weights: bool = True) -> list[list[Action]]:
    """Zero bubble in 1F1B's memory: at most `ranks` whole-rank microbatches; without `weights`, only F and I."""
    orders = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        legs = [(down, Op.F)] * (2 * (ranks - rank) - 1)
        legs += [(up, Op.F), (down, Op.F)] * rank
        legs += [(up, Op.F), (up, Op.I)] * (ranks - rank)
        legs += [(down, Op.F), (down, Op.I), (up, Op.F), (up, Op.I)] * microbatches
        orders.append(_numbered(legs, microbatches))
    return fill_weights(orders, v_placement(ranks), cap=2 * ranks).orders if weights else orders


def v_placement(ranks: int) -> list[int]:
    """Return the rank of each stage: down the V and up again."""
    return [*range(ranks), *reversed(range(ranks))]


def _numbered(legs: Sequence[tuple[int, Op]], microbatches: int) -> list[Action]:
    """Give each leg's microbatches their turns in order, and leave out the turns past the last.

    Leaving out is safe: of an order that finishes, what some microbatches do finishes too, as
    microbatches do not need each other.
    """
    counts: Counter[tuple[int, Op]] = Counter()
    order = []
    for stage, op in legs:
        microbatch = counts[stage, op]
        counts[stage, op] += 1
        if microbatch < microbatches:
            order.append(trusted(stage, op, microbatch))
    return order


def _best(blocks: tuple[VBlock, ...], ranks: int, microbatches: int, cap: int) -> list[list[Action]]:
    """Choose the order that suits these numbers best, on a batch that is just long enough.

    More microbatches only repeat the middle, which takes the same time in every order that fits.
    """
    trial = min(microbatches, 2 * ranks)
    maker, filled = _best_of_trial(blocks, ranks, trial, cap, PERIOD * ranks * microbatches <= LARGE)
    if trial < microbatches:
        filled = maker(ranks, microbatches, cap) or _repeat(blocks[0], ranks, microbatches, cap)
    return [list(order) for order in filled.orders]


@lru_cache(maxsize=8)
def _best_of_trial(
    blocks: tuple[VBlock, ...], ranks: int, trial: int, cap: int, with_rhythm: bool
) -> tuple[Callable[[int, int, int], Filled | None], Filled]:
    """Return what makes the best order of so many microbatches, and that order; kept for longer batches."""
    makers: list[Callable[[int, int, int], Filled | None]] = [partial(_repeat, block) for block in blocks]
    if with_rhythm:
        makers.append(_in_rhythm)
    trials = [(preference(filled, cap), maker, filled) for maker in makers if (filled := maker(ranks, trial, cap))]
    _, maker, filled = min(trials, key=lambda found: found[0])
    return maker, filled


def _in_rhythm(ranks: int, microbatches: int, cap: int) -> Filled | None:
    """Build the order of a V that keeps to a rhythm, with a fill as quick as memory allows; None where it stops."""
    problem = Problem(Placement.v(ranks, 2), microbatches, Costs(), (float(cap),) * ranks)
    found = dispatch(problem, Rhythm(patience=0.0, overrun=0.0, weight_time=1.0))
    if found is None:
        return None
    orders = [[problem.action(x) for x in order if x < 2 * problem.size] for order in found.orders]
    return fill_weights(orders, v_placement(ranks), cap)


def _repeat(block: VBlock, ranks: int, microbatches: int, cap: int) -> Filled:
    """Build the order of a block that is repeated for each microbatch, with W filled in."""
    orders = []
    for rank in range(ranks):
        timed = sorted(
            (slot + PERIOD * microbatch, leg, stage, op, microbatch)
            for leg, (slot, stage, op) in enumerate(_legs(block, rank, ranks))
            for microbatch in range(microbatches)
        )
        orders.append([trusted(stage, op, microbatch) for _, _, stage, op, microbatch in timed])
    return fill_weights(orders, v_placement(ranks), cap)


def _legs(block: VBlock, rank: int, ranks: int) -> list[tuple[int, int, Op]]:
    """Return what a rank does for microbatch 0, one action on each leg: slot, stage and op."""
    last = ranks - 1
    turns = [1 + rest for rest in block.rests]
    up_starts = block.down * last + turns[0]
    back_down_starts = up_starts + block.up * last + turns[1]
    back_up_starts = back_down_starts + block.back_down * last + turns[2]
    down, up = rank, 2 * ranks - 1 - rank
    return [
        (block.down * rank, down, Op.F),
        (up_starts + block.up * (last - rank), up, Op.F),
        (back_down_starts + block.back_down * rank, up, Op.I),
        (back_up_starts + block.back_up * (last - rank), down, Op.I),
    ]
