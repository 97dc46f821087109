"""Every schedule with replicas computes what one process computes on the whole batch.

Four processes are two replicas of a pipeline of two ranks. Each case is two steps, with an evaluation between; bit for
bit where gradients are added in the order of microbatches, each replica's first and then the replicas'.
"""

from __future__ import annotations

from typing import Any

import pytest
from exactness.cases import WIDE
from parallel.cases import Case, all_pipelined, differences
from processes import on_processes

from penstock.schedule.builders import TRAINING


def check(cases: list[Case]) -> None:
    by_rank = on_processes(cases[0].pp * len(cases[0].rows), all_pipelined, cases)
    faults = {
        str(case): found
        for number, case in enumerate(cases)
        if (found := differences(case, [outcomes[number] for outcomes in by_rank]))
    }
    assert faults == {}


@pytest.mark.slow
def test_replicas_plain_and_sharded() -> None:
    check(
        [
            Case("1f1b", "ddp", "tied", rows=(13, 5)),
            Case("looped-bfs", "ddp"),
            Case("zb-v", "ddp", "unused", rows=(7, 8)),
            Case("dualpipe-v", "ddp", optimizer=True),
            Case("zb-h1", "fsdp", "unused", rows=(7, 8)),
            Case("interleaved-1f1b", "fsdp", "tied", optimizer=True),
            Case("zb-v", "fsdp", window=1),
        ]
    )


@pytest.mark.parametrize(
    ("replicate", "every"),
    [
        pytest.param("fsdp", False, marks=pytest.mark.slow),
        pytest.param("fsdp", True, marks=pytest.mark.exhaustive),
        pytest.param("ddp", True, marks=pytest.mark.exhaustive),
    ],
)
def test_every_schedule(replicate: str, every: bool) -> None:
    """Each family with an optimizer, with tied weights, with outputs of several rows and with a window: one of these
    by turns, or `every` one."""
    kinds: list[dict[str, Any]] = [{}, {"model": "tied"}, {"optimizer": True}, {"model": "several", "rows": (9, 6)}]
    cases = [
        Case(family, replicate, **kind)
        for row, family in enumerate(TRAINING)
        for turn, kind in enumerate(kinds)
        if every or row % len(kinds) == turn
    ]
    if replicate == "fsdp":
        cases += [Case(family, replicate, window=1) for family in WIDE[:: 1 if every else 4]]
        cases.append(Case("zb-v", replicate, window=9))
    check(cases)


@pytest.mark.slow
def test_three_replicas() -> None:
    check([Case(family, kind, rows=(5, 4, 6)) for family in ("1f1b", "zb-h1") for kind in ("ddp", "fsdp")])
