"""dualpipe-v: the V placement, with forwards and backwards paired to hide each other's transfers.

DeepSeek's DualPipe (arXiv 2412.19437) splits forward and backward so finely that the
transfers of one hide behind the computation of the other; what a schedule must do for that is
name pairs of a forward and a backward that share a rank and do not need each other. On the V
a rank has both at hand: while it takes one microbatch down the V it can take another's
gradient back up, and then the other way round. DualPipeV
(github.com/deepseek-ai/DualPipe), as torch's ScheduleDualPipeV also prints it, is on rank r,
with `below` ranks after it, and down and up for the stages on the two sides of the V:

    times               what
    2 * below           F down
    rank + 1            F down, F up
    below               I up, W, F up
    the rest            (F down; B up), (F up; B down)
    below               B up, (F up; B down)
    rank + 1            B up, B down; the last rank + 1 of these backwards are I
    below               W, I down
    what is owed        W

Backwards are split only where a neighbour waits, in the fill and the drain. A pair holds one
activation more than its backward releases in time, so a rank holds up to 2 * ranks + 1
microbatch-stages: half a whole-rank microbatch above 1F1B.

The table needs 2 * ranks - 1 microbatches, or "the rest" is below zero on the first rank. A
smaller batch takes the table of that many and leaves out the first ones: microbatches do not
need each other, so what the others do still finishes. The first are left out, not the last,
because the drain, which stays, is where the split backwards are.
"""

from __future__ import annotations

from collections import Counter

from penstock.schedule.action import Action, Op, trusted

Step = tuple[tuple[int, Op], ...]  # one (stage, op), or the two of a pair


def dualpipe_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """Build the order of a V placement with overlapped pairs in the middle, and split backwards in fill and drain."""
    absent = max(0, 2 * ranks - 1 - microbatches)
    return [_numbered(_steps(rank, ranks, absent + microbatches), absent) for rank in range(ranks)]


def _steps(rank: int, ranks: int, microbatches: int) -> list[Step]:
    """Return the steps of one rank in the table above."""
    below = ranks - 1 - rank
    down, up = rank, 2 * ranks - 1 - rank
    forward_down, forward_up, backward_up = ((down, Op.F),), ((up, Op.F),), ((up, Op.B),)
    pair_down, pair_up = ((down, Op.F), (up, Op.B)), ((up, Op.F), (down, Op.B))

    steps: list[Step] = [forward_down] * (2 * below)
    steps += [forward_down, forward_up] * (rank + 1)
    steps += [((up, Op.I),), ((up, Op.W),), forward_up] * below
    middle: list[Step] = [pair_down, pair_up] * (microbatches - 2 * ranks + rank + 1)
    if middle and below == 0:  # here the first gradient comes last: the forward need not wait for it
        middle[:1] = [forward_down, backward_up]
    steps += middle
    steps += [backward_up, pair_up] * below
    stages = [up, down] * (rank + 1)
    steps += [((stage, Op.B),) for stage in stages[: rank + 1]]
    split = stages[rank + 1 :] + [down] * below
    weights: list[Step] = [((stage, Op.W),) for stage in split]
    steps += [((stage, Op.I),) for stage in split[: rank + 1]]
    for turn in range(below):
        steps += (weights[turn], ((down, Op.I),))
    return steps + weights[below:]


def _numbered(steps: list[Step], absent: int) -> list[Action]:
    """Give each stage's microbatches their turns in order, and leave out the first `absent` of them."""
    counts: Counter[tuple[int, Op]] = Counter()
    actions = []
    for step in steps:
        parts = []
        for stage, op in step:
            halves = (Op.I, Op.W) if op is Op.B else (op,)
            microbatch = counts[stage, halves[0]] - absent
            for half in halves:
                counts[stage, half] += 1
            if microbatch >= 0:
                parts.append(trusted(stage, op, microbatch))
        actions += parts if len(parts) < 2 else [Action.overlap(*parts)]
    return actions
