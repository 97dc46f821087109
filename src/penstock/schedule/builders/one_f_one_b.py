"""Schedules that turn to one forward, one backward as soon as they can: 1f1b, interleaved.

A rank runs a few warm-up forwards and then alternates, so that what is in flight is bounded
by the depth of the pipeline, not by the number of microbatches.

    slot    0   1   2   3   4   5
    rank 0  0F0 0F1 .   0B0 .   0B1
    rank 1  .   1F0 1B0 1F1 1B1 .

Interleaved: with several stages on a rank, microbatches go through in rounds of about
`ranks`, depth first (arXiv 2104.04473). Where microbatches do not divide by ranks, the rounds
are uneven: as many rounds as there are whole ones, the extra microbatches spread over the
first of them, so a round is never shorter than the pipeline unless the batch itself is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.schedule.action import Action, Op, in_order


def one_f_one_b(ranks: int, microbatches: int) -> list[list[Action]]:
    """Build a warm-up of at most `ranks - rank` forwards, then one backward and one forward in turn."""
    rows = []
    for rank in range(ranks):
        forwards, backwards = (in_order(rank, op, range(microbatches)) for op in (Op.F, Op.B))
        rows.append(alternate(forwards, backwards, warmup=ranks - rank))
    return rows


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[list[Action]]:
    """Build one forward, one backward over several stages per rank, in rounds."""
    if stages_per_rank == 1:
        yield from one_f_one_b(ranks, microbatches)
        return
    sizes = rounds(ranks, microbatches)
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards, backwards = in_rounds(stages, Op.F, sizes), in_rounds(stages[::-1], Op.B, sizes)
        # enough forwards that the first microbatch is through every stage, and two more for each
        # rank that its gradient must pass on the way back: the turn is then met without a gap
        warmup = (stages_per_rank - 1) * sizes[0] + 2 * (ranks - 1 - rank) + 1
        yield alternate(forwards, backwards, warmup)


def in_rounds(stages: Sequence[int], op: Op, sizes: Sequence[int]) -> list[Action]:
    """Return one op of all microbatches: round by round, and in a round stage by stage."""
    order, first = list[Action](), 0
    for size in sizes:
        for stage in stages:
            order += in_order(stage, op, range(first, first + size))
        first += size
    return order


def rounds(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of the rounds: as even as can be, the larger ones first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Join `warmup` forwards, then a backward and a forward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (backward, forward)
    return order + backwards[len(forwards) - warmup :]


def overlap_b_f(row: list[Action]) -> list[Action]:
    """Join each backward and the forward that follows it to a pair, `OVERLAP_B_F`; no forward needs that backward."""
    paired: list[Action] = []
    for action in row:
        if action.op is Op.F and paired and paired[-1].op is Op.B:
            paired[-1] = Action.overlap(paired[-1], action)
        else:
            paired.append(action)
    return paired
