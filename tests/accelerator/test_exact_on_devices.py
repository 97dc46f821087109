"""Every family on devices computes what a plain loop on one device computes, bit for bit and without a race."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from exactness.cases import WIDE, Case
from tiers import by_turns, mostly_slow

from penstock.schedule.builders import TRAINING

DRAWS = "transformer"  # the model with dropout, and the small GPT of these tests
STILL = ("mlp", "several", "skip")


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


@pytest.mark.parametrize(("family", "name"), by_turns(TRAINING, NAMES, fast=[("1f1b", "pretend"), ("zb-v", "pretend")]))
def test_threads(family: str, name: str) -> None:
    assert on_device(FAULTS_ON_THREADS, still_cases(family), name=name).value == {}


@pytest.mark.parametrize("family", mostly_slow(["1f1b", "zb-v", "dualpipe-v"], "1f1b"))
def test_threads_whose_streams_run_behind_the_host(family: str) -> None:
    assert on_device("accelerator.exact:faults_behind_the_host", still_cases(family), name="cuda").value == {}


@pytest.mark.parametrize(("family", "name"), by_turns(TRAINING, NAMES, fast=[("1f1b", "pretend")]))
def test_threads_with_dropout(family: str, name: str) -> None:
    cases = [drawing_case(family, recompute=recompute) for recompute in ("never", "always")]
    assert on_device(FAULTS_ON_THREADS, cases, name=name).value == {}


def on_processes(ranks: int, families: tuple[str, ...], model: str, **options: Any) -> list[Case]:
    return [
        Case(family, model, ranks=ranks, stages=stages_of(family, ranks), microbatches=5, rows=9, **options)
        for family in families
    ]


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lazy", "eager"])
def test_two_processes(eager: bool) -> None:
    cases = on_processes(2, ("1f1b", "zb-v", "dualpipe-v"), "mlp", optimizer=True)
    outcomes = on_ranks(2, FAULTS_ON_PROCESSES, cases, name="cuda", eager=eager, limit=20)
    assert [(each.value, each.races) for each in outcomes] == [({}, []), ({}, [])]


@pytest.mark.parametrize(("ranks", "model", "name"), by_turns([2, 4], ["mlp", DRAWS], NAMES))
def test_every_family_on_processes(ranks: int, model: str, name: str) -> None:
    recompute = "always" if model == DRAWS else "never"
    cases = on_processes(ranks, TRAINING, model, recompute=recompute)
    outcomes = on_ranks(ranks, FAULTS_ON_PROCESSES, cases, name=name, limit=60)
    assert [each.value for each in outcomes] == [{}] * ranks


@pytest.mark.slow
def test_processes_whose_streams_run_behind_the_host() -> None:
    cases = on_processes(2, ("1f1b", "zb-v"), "mlp", optimizer=True)
    outcomes = on_ranks(2, "accelerator.exact:faults_behind_the_host", cases, limit=25)
    assert [each.value for each in outcomes] == [{}, {}]
