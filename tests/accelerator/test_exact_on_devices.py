"""Every family on devices computes what a plain loop on one device computes, bit for bit and without a race."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from exactness.cases import WIDE, Case
from tiers import mostly_slow

from penstock.schedule.builders import TRAINING

DRAWS = "transformer"  # the model with dropout, and the small GPT of these tests
STILL = ("mlp", "several", "skip")
NOT_YET = pytest.mark.xfail(strict=True, reason="finding 1 (F1, F2): both directions of a pair on one communicator")
MASKS = pytest.mark.xfail(strict=True, reason="findings 3 and F3: masks of a recomputed forward on a device are others")


def stages_of(family: str, ranks: int) -> int:
    return ranks * (2 if family in WIDE else 1)


def still_cases(family: str) -> list[Case]:
    """Models without random numbers; one of them in bfloat16, and recomputed."""
    stages = stages_of(family, 2)
    cases = [
        Case(family, "mlp", stages=stages, recompute="always"),
        Case(family, "mlp", stages=stages, microbatches=3, rows=7, optimizer=True),
    ]
    if stages == 4:
        cases += [Case(family, "several", optimizer=True), Case(family, "skip")]
    return cases


def drawing_case(family: str, **options: Any) -> Case:
    return Case(family, DRAWS, stages=stages_of(family, 2), **options)


# By name: that module loads the device, which only the processes that run on it may do.
FAULTS_ON_THREADS = "accelerator.exact:faults_on_threads"
FAULTS_ON_PROCESSES = "accelerator.exact:faults_on_processes"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", mostly_slow(TRAINING, "1f1b", "zb-v"))
def test_threads(family: str, name: str) -> None:
    assert on_device(FAULTS_ON_THREADS, still_cases(family), name=name).value == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", mostly_slow(TRAINING, "1f1b"))
def test_threads_with_dropout(family: str, name: str) -> None:
    assert on_device(FAULTS_ON_THREADS, [drawing_case(family)], name=name).value == {}


@MASKS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", mostly_slow(TRAINING, "1f1b"))
def test_threads_with_dropout_that_is_drawn_again(family: str, name: str) -> None:
    assert on_device(FAULTS_ON_THREADS, [drawing_case(family, recompute="always")], name=name).value == {}


def on_processes(ranks: int, model: str, **options: Any) -> list[Case]:
    return [
        Case(family, model, ranks=ranks, stages=stages_of(family, ranks), microbatches=5, rows=9, **options)
        for family in TRAINING
    ]


@NOT_YET
@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", mostly_slow(NAMES, "cuda"))
def test_two_processes(name: str, eager: bool) -> None:
    cases = on_processes(2, "mlp", optimizer=True)
    outcomes = on_ranks(2, FAULTS_ON_PROCESSES, cases, name=name, eager=eager, limit=60)
    assert [each.value for each in outcomes] == [{}, {}]


@NOT_YET
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_with_dropout(name: str, recompute: str) -> None:
    cases = on_processes(2, DRAWS, recompute=recompute)
    outcomes = on_ranks(2, FAULTS_ON_PROCESSES, cases, name=name, limit=60)
    assert [each.value for each in outcomes] == [{}, {}]


@NOT_YET
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_processes(name: str) -> None:
    outcomes = on_ranks(4, FAULTS_ON_PROCESSES, on_processes(4, "mlp"), name=name, limit=60)
    assert [each.value for each in outcomes] == [{}, {}, {}, {}]
