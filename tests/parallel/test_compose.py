"""Every schedule with replicas computes what one process computes on the whole batch.

Four processes are two replicas of a pipeline of two ranks. Each case is two steps, with an evaluation between; bit for
bit where gradients are added in the order of microbatches, each replica's first and then the replicas'.
"""

from __future__ import annotations

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
    """Each family; with and without an optimizer, with tied weights and with a window by turns, or `every` one."""
    cases = [
        Case(family, replicate, optimizer=which)
        for row, family in enumerate(TRAINING)
        for which in (False, True)
        if every or row % 2 == which
    ]
    step = 1 if every else 2
    cases += [Case(family, replicate, "tied") for family in TRAINING[::step]]
    cases += [Case(family, replicate, "several", rows=(9, 6)) for family in ("gpipe", "interleaved-zb", "v-min")]
    if replicate == "fsdp":
        cases += [Case(family, replicate, window=1) for family in WIDE[::step]] + [Case("zb-v", replicate, window=9)]
    check(cases)


@pytest.mark.slow
def test_three_replicas() -> None:
    check([Case(family, kind, rows=(5, 4, 6)) for family in ("1f1b", "zb-h1") for kind in ("ddp", "fsdp")])
