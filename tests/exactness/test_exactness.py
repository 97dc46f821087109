"""Every schedule computes what plain gradient accumulation computes: loss, every gradient, every buffer, bit for bit.

Bit for bit wherever each stage adds its gradients in the order of microbatches, which every family does but looped-bfs:
it runs its backwards last microbatch first, and so is compared in double precision, to 1e-12. Each case is two steps,
because the second catches what the first left behind: once with gradients that add up, once with an optimizer. All
others in single precision, and some in bfloat16; what keeps them exact on every processor is in test_in_memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from exactness.cases import WIDE, Case, all_pipelined, differences, pipelined
from exactness.models import MODELS
from processes import on_processes
from tiers import in_tiers, mostly_slow, slow_if
from transports import ON_PROCESSES, buffering

from penstock.runtime.transport import ThreadTransport
from penstock.schedule.builders import TRAINING

EVERY = [Case(family, model, optimizer=which) for family in TRAINING for model in MODELS for which in (False, True)]
HALF = [Case(family, list(MODELS)[row % len(MODELS)], rows=9, bfloat16=True) for row, family in enumerate(TRAINING)]
SEARCHED = [
    Case("auto", "transformer", optimizer=True),
    Case("auto", "skip"),
    Case("auto", "mlp", stages=2, rows=7),
    Case("steady", "mlp", stages=8, microbatches=6, rows=13, optimizer=True),
]


def by_turns(first: int) -> list[Any]:
    """Every other model in the slow tests, with one of the transports; the others in the exhaustive ones.

    The fast tests have every family with both transports, the slow ones with every model on two or four processes.
    """
    return [
        pytest.param(model, kind, marks=slow_if(row % 2 == first and row // 2 % len(ON_PROCESSES) == column))
        for row, model in enumerate(MODELS)
        for column, kind in enumerate(ON_PROCESSES)
    ]


def is_its_turn(case: Case) -> bool:
    """Whether to run this one of the two that a family and a model have, with an optimizer and without."""
    return (TRAINING.index(case.family) + list(MODELS).index(case.model) + case.optimizer) % 2 == 0


def halved(cases: list[Case]) -> list[Any]:
    """Each family with every other model, with or without an optimizer by turns; all in the exhaustive tests.

    Of these the fast tests have one model for each family, the slow ones all others. Each family with each model is
    in the slow tests on processes.
    """
    found = []
    for case in cases:
        row, column = TRAINING.index(case.family), list(MODELS).index(case.model)
        is_fast = column == (row + row % 2) % len(MODELS)
        is_often = is_its_turn(case) and (is_fast or (row // 2 + column) % 2 == 0)
        found.append(pytest.param(case, marks=[] if is_fast and is_often else slow_if(is_often)))
    return found


def one_in(count: int, cases: list[Any]) -> list[Any]:
    """One of so many in the fast tests, so that families and models take turns; the others in the slow ones."""
    return mostly_slow(cases, *cases[::count])


def some_in(count: int, cases: list[Any], kinds: int) -> list[Any]:
    """As `one_in`, of families that have so many kinds each: one in three, by turns, in slow tests, the rest only in
    exhaustive ones.
    """
    return in_tiers(
        cases, cases[::count], [case for number, case in enumerate(cases) if sum(divmod(number, kinds)) % 3]
    )


def odd_sizes() -> list[Case]:
    """Rows that do not divide, fewer microbatches than ranks, one microbatch, one rank."""
    found = []
    for family in TRAINING:
        stages = 2 if family in WIDE else 1
        found += [
            Case(family, "mlp", microbatches=3, rows=7),
            Case(family, "transformer", microbatches=5, rows=11),
            Case(family, "mlp", ranks=4, stages=4 * stages, microbatches=2, rows=5),
            Case(family, "conv", ranks=4, stages=4 * stages, microbatches=1, rows=2),
            Case(family, "several", ranks=1, stages=stages, microbatches=3, rows=7),
            Case(family, "mlp", ranks=3, stages=3 * stages, microbatches=7, rows=7),
        ]
    return found


def check(case: Case) -> None:
    assert differences(case, [pipelined(case)]) == []


def check_on_processes(cases: list[Case], transport: str) -> None:
    (ranks,) = {case.ranks for case in cases}
    by_rank = on_processes(ranks, all_pipelined, cases, transport)
    faults = {
        str(case): found
        for number, case in enumerate(cases)
        if (found := differences(case, [outcomes[number] for outcomes in by_rank]))
    }
    assert faults == {}


def test_only_looped_bfs_adds_gradients_in_another_order_than_the_plain_loop() -> None:
    out_of_order = {case.family for case in [*EVERY, *SEARCHED, *odd_sizes(), *on_four()] if not case.in_order}
    assert out_of_order == {"looped-bfs"}


@pytest.mark.parametrize("case", [*halved(EVERY), *one_in(4, HALF), *one_in(3, SEARCHED)], ids=str)
def test_threads(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", some_in(7, odd_sizes(), 6), ids=str)
def test_threads_with_odd_sizes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("family", "model"), some_in(3, [(family, model) for family in TRAINING for model in ("transformer", "skip")], 2)
)
def test_threads_with_nothing_buffered(family: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    group = ThreadTransport.group

    def seen(*given: Any, capacity: int | None = None, **more: Any) -> Any:
        asked.append(capacity)
        return group(*given, capacity=capacity, **more)

    monkeypatch.setattr(ThreadTransport, "group", seen)
    with buffering(0):
        check(Case(family, model))
    assert asked == [0]


RECOMPUTED = [
    Case(family, model, recompute=recompute)
    for family in TRAINING
    for model, recompute in [
        ("transformer", "except_last"),
        ("transformer", "always"),
        ("conv", "always"),
        ("conv", "except_last"),
    ]
]


@pytest.mark.parametrize("case", some_in(5, RECOMPUTED, 4), ids=str)
def test_threads_with_recompute(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_two_processes(transport: str) -> None:
    """Every family on a transport, with models, by turns; the slow tests have all of them."""
    models, turn = ("transformer", "several", "skip", "strange"), ON_PROCESSES.index(transport)
    cases = [
        Case(family, models[(row // 2 + turn) % 4], rows=9, bfloat16=(row + turn) % 3 == 0)
        for row, family in enumerate(TRAINING)
        if row % 2 == turn
    ]
    check_on_processes([SEARCHED[turn % len(SEARCHED)], *cases], transport)


def on_four() -> list[Case]:
    """Every other one with an optimizer; two processes have each with and without in the exhaustive tests."""
    return [
        Case(
            family, model, ranks=4, stages=8 if family in WIDE else 4, microbatches=6, optimizer=(row + column) % 2 == 1
        )
        for row, family in enumerate(TRAINING)
        for column, model in enumerate(MODELS)
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "transport"), by_turns(0))
def test_two_processes_every_model(model: str, transport: str) -> None:
    """With an optimizer or without one by turns, as on four."""
    cases = [*filter(is_its_turn, EVERY), *odd_sizes()]
    check_on_processes([case for case in cases if case.model == model and case.ranks == 2], transport)


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ON_PROCESSES)
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_where_it_is_not_their_turn(model: str, transport: str) -> None:
    check_on_processes([case for case in EVERY if case.model == model and not is_its_turn(case)], transport)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "transport"), by_turns(1))
def test_four_processes_every_model(model: str, transport: str) -> None:
    cases = [case for case in [*on_four(), *odd_sizes()] if case.model == model and case.ranks == 4]
    check_on_processes(cases, transport)
