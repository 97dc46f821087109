"""What a stage is given lies in memory as in the plain loop: the same bits, strides and place in a cache line.

Kernels choose by strides and addresses how they compute, differently on every processor; so this, and not the numbers
that one machine's kernels make of it, is what keeps a pipeline exact on all of them. Threads, processes over shared
memory and over gloo; every family, skips, gradients on their way back, recomputation, and a batch that only the first
rank is given.
"""

from __future__ import annotations

from collections import Counter

import pytest
from exactness.cases import Case
from exactness.looking import Seen, all_seen, seen_pipelined, seen_plain
from exactness.models import MODELS
from processes import on_processes
from tiers import in_tiers, mostly_slow
from transports import ON_PROCESSES

from penstock.schedule.builders import TRAINING

ROWS = 9  # in microbatches of 3, 2, 2 and 2


def differences(case: Case, found: Counter[Seen]) -> dict[str, list[Seen]]:
    wanted = seen_plain(case)
    if case.recompute != "never":  # each forward twice, or also a third time
        found, wanted = Counter(set(found)), Counter(set(wanted))
    parts = {"too much": found - wanted, "missing": wanted - found}
    return {name: sorted(seen.elements())[:5] for name, seen in parts.items() if seen}


def by_turns() -> list[object]:
    """Every family with the strange model, half of them in the slow tests; there, each with some of the others too."""
    cases = [
        Case(family, model, rows=ROWS, bfloat16=(row + column) % 2 == 1)
        for row, family in enumerate(TRAINING)
        for column, model in enumerate(MODELS)
    ]
    strange = [case for case in cases if case.model == "strange"]
    often = [case for number, case in enumerate(cases) if sum(divmod(number, len(MODELS))) % 4 == 0]
    return in_tiers(cases, strange[::2], [case for case in cases if case not in (*often, *strange)])


@pytest.mark.parametrize("case", by_turns(), ids=str)
def test_threads(case: Case) -> None:
    assert differences(case, seen_pipelined(case)) == {}


@pytest.mark.parametrize("model", ["strange", "skip"])
def test_threads_with_recompute(model: str) -> None:
    case = Case("zb-v", model, rows=ROWS, recompute="always")
    assert differences(case, seen_pipelined(case)) == {}


@pytest.mark.parametrize("transport", mostly_slow(ON_PROCESSES, "shared"))
def test_processes(transport: str) -> None:
    first, every = "first", "every"
    cases = [
        (Case("1f1b", "strange", rows=ROWS), every),
        (Case("zb-v", "strange", rows=ROWS, bfloat16=True), first),
        (Case("interleaved-zb", "skip", rows=ROWS, recompute="always"), every),
        (Case("interleaved-1f1b", "several", rows=ROWS), first),
        (Case("gpipe", "conv", rows=ROWS), every),
    ]
    ranks = on_processes(2, all_seen, cases, transport)
    for (case, _), *parts in zip(cases, *ranks, strict=True):
        found: Counter[Seen] = sum(parts, Counter())
        assert differences(case, found) == {}, case
