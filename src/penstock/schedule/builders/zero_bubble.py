"""Zero-bubble schedules on one stage per rank, or on several in a loop: zb-h1, zb-h2, interleaved-zb and its groups.

1F1B idles because a rank's backward keeps its neighbour waiting for two things at once.
Split in two (arXiv 2401.10241), only the half I that makes the neighbour's gradient is
awaited, and the other half, W, is work to put where the rank would idle. So these builders
say in which order a rank runs F and I, and `filling` places W:

    zb-h1   rank 0  0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2
            rank 1  .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

(s F m: stage s, microbatch m.) The order is 1F1B's: some warm-up forwards, then I and F in
turn. Only the warm-up and the cap on activations held (from F to W) tell one family from
another. With equal costs:

- H1 warms up like 1F1B, with `ranks - rank` forwards, in 1F1B's memory. The first rank
  waits for its first gradient and idles ranks - 1 slots, a third of 1F1B's bubble.
- H2 warms up with `2 * (ranks - rank) - 1` forwards: as many as fit until the first gradient
  can be there. No rank idles between its first action and its last.
- interleaved-zb takes a round of microbatches through all of a rank's stages, depth first.
  A rank needs all forwards of a round except those of its last stage before the first
  gradient can exist, and then H1's warm-up on that last stage.
- group-interleaved takes smaller rounds, of half as many microbatches as there are ranks. In the middle a rank runs
  F, I and W in turn, so a microbatch needs half a turn for each hop, and is back on the first rank when its round has
  passed. It holds `ranks * (stages_per_rank + 1) / 2` stages of microbatches: three quarters of H1's memory with two
  stages per rank, five eighths with four.

With `weights=False` a builder leaves W out where that saves time, for a caller that places them by other costs.

Rounds here are never larger than `ranks`, unlike interleaved 1F1B's: a larger round alone
would hold more than the `ranks` whole-rank microbatches that H1 promises. So a remainder
either is a short round at the end, or is taken from all rounds evenly, whichever is shorter.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, in_order
from penstock.schedule.builders.filling import Filled, fill_weights, preference
from penstock.schedule.builders.one_f_one_b import alternate, in_rounds


def zb_h1(ranks: int, microbatches: int, *, weights: bool = True) -> list[list[Action]]:
    """Zero bubble in 1F1B's memory: at most `ranks` microbatches on a rank."""
    return interleaved_zb(ranks, microbatches, stages_per_rank=1, weights=weights)


def zb_h2(ranks: int, microbatches: int, *, weights: bool = True) -> list[list[Action]]:
    """Zero bubble with no idle slot inside, in up to twice 1F1B's memory."""
    orders = []
    for rank in range(ranks):
        forwards, inputs = (in_order(rank, op, range(microbatches)) for op in (Op.F, Op.I))
        orders.append(alternate(forwards, inputs, warmup=2 * (ranks - rank) - 1))
    return fill_weights(orders, range(ranks), cap=2 * ranks - 1).orders if weights else orders


def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int, *, weights: bool = True) -> list[list[Action]]:
    """Build the interleaved order with W delayed into the bubbles: at most `ranks` whole-rank microbatches."""
    return _best_rounds(ranks, microbatches, stages_per_rank, ranks, stages_per_rank * ranks, weights)


def group_interleaved(
    ranks: int, microbatches: int, stages_per_rank: int, *, weights: bool = True
) -> list[list[Action]]:
    """Build the interleaved order in rounds of half the ranks: at most `group_cap` stages of microbatches."""
    cap = group_cap(ranks, stages_per_rank)
    return _best_rounds(ranks, microbatches, stages_per_rank, (ranks + 1) // 2, cap, weights)


def group_cap(ranks: int, stages_per_rank: int) -> int:
    """Return how many stages of microbatches the first rank of group-interleaved holds."""
    return (stages_per_rank - 1) * ((ranks + 1) // 2) + ranks


def _best_rounds(
    ranks: int, microbatches: int, stages_per_rank: int, size: int, cap: int, weights: bool
) -> list[list[Action]]:
    """Build rounds of `size`, with a remainder at the end or spread over all of them, whichever is shorter.

    A round that is smaller than half the ranks may keep ranks waiting in a circle: it comes around the loop before its
    turn. So the remainder may also make the first rounds larger, which always finishes, and takes more memory.
    """
    rounds, remainder = divmod(microbatches, size)
    choices = [[size] * rounds + [remainder] * (remainder > 0)]
    if rounds and remainder and stages_per_rank > 1:
        smaller, larger = divmod(microbatches, rounds + 1)
        choices.append([smaller + 1] * larger + [smaller] * (rounds + 1 - larger))
        if size < ranks:
            smaller, larger = divmod(microbatches, rounds)
            choices.append([smaller + 1] * larger + [smaller] * (rounds - larger))
    if not weights and len(choices) == 1:
        return _in_turn(ranks, choices[0], stages_per_rank)
    found = [_interleaved(ranks, sizes, stages_per_rank, cap) for sizes in choices]
    candidates = [filled for filled in found if filled is not None]
    return min(candidates, key=lambda filled: preference(filled, cap)).orders


def _interleaved(ranks: int, sizes: list[int], stages_per_rank: int, cap: int) -> Filled | None:
    """Build the interleaved order over rounds of these sizes; return None where it never finishes."""
    stage_count = stages_per_rank * ranks
    orders = _in_turn(ranks, sizes, stages_per_rank)
    if not _turns_in_order(orders[-1], stage_count - 1):
        return None
    try:
        return fill_weights(orders, [stage % ranks for stage in range(stage_count)], cap)
    except ScheduleError:
        return None


def _in_turn(ranks: int, sizes: list[int], stages_per_rank: int) -> list[list[Action]]:
    """Return F and I of the interleaved order over rounds of these sizes."""
    orders = []
    for rank in range(ranks):
        stages = range(rank, stages_per_rank * ranks, ranks)
        forwards, inputs = in_rounds(stages, Op.F, sizes), in_rounds(stages[::-1], Op.I, sizes)
        orders.append(alternate(forwards, inputs, warmup=(stages_per_rank - 1) * sizes[0] + ranks - rank))
    return orders


def _turns_in_order(order: list[Action], last: int) -> bool:
    """Return whether every microbatch passes the last stage forward before it goes back."""
    forwards = backwards = 0
    for action in order:
        if action.stage == last:
            forwards += action.op is Op.F
            backwards += action.op is Op.I
            if backwards > forwards:
                return False
    return True
