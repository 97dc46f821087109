"""Microbatches by length: every row once, and the heaviest as light as can be."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.runtime.batch.lengths import ByTokens, LengthPlan


def test_uneven_batches_make_even_microbatches() -> None:
    """One row of 512 tokens and 64 of 8: by rows, 16 microbatches would cost 5 * 512 each."""
    plan = penstock.by_tokens(512).plan((), {"lengths": torch.tensor([512, *[8] * 64])}, 1, False)
    assert plan is not None
    assert sorted(plan.tokens) == [512, 512]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 9), st.integers(0, 60))
def test_plans_hold_every_row_once_and_the_heaviest_is_as_light_as_can_be(
    lengths: list[int], count: int, more: int
) -> None:
    count = min(count, len(lengths))
    given = {"lengths": torch.tensor(lengths)}
    plan = ByTokens(None, "lengths", ()).plan((), given, count, True)
    assert plan is not None
    assert plan.count == count
    check_plan(plan, lengths)
    ranked = sorted(max(1, length) for length in lengths)
    best = min(
        max((end - first) * ranked[end - 1] for first, end in itertools.pairwise([0, *cuts, len(ranked)]))
        for cuts in itertools.combinations(range(1, len(ranked)), count - 1)
    )
    assert max(plan.tokens) == best
    cap = max(ranked) + more
    capped = ByTokens(cap, "lengths", ()).plan((), given, 1, False)
    assert capped is not None
    assert max(capped.tokens) <= cap
    check_plan(capped, lengths)


def check_plan(plan: LengthPlan, lengths: list[int]) -> None:
    assert sorted(row for rows in plan.rows for row in rows) == list(range(len(lengths)))
    for rows, width in zip(plan.rows, plan.widths, strict=True):
        assert width == max(1, max(lengths[row] for row in rows))
    assert torch.equal(torch.cat(plan.index)[plan.inverse], torch.arange(len(lengths)))
