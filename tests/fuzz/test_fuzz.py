"""The fuzz itself, and some of its cases; `python -m tests.fuzz` runs as many as you like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transports import ON_PROCESSES

from fuzz.case import CHANGING, NESTS, Case, Layer, draw
from fuzz.program import program
from fuzz.run import Outcome, judged, run_on_processes, run_on_threads
from fuzz.shrink import shrink, smaller
from penstock.errors import ModelError, RunError
from penstock.pipeline.batches import Batches
from penstock.runtime.loss.check import LossCheck
from penstock.runtime.loss.shares import BatchShares

DENSE = Layer("Dense")


def failures(cases: list[Case], outcomes: list[Outcome]) -> list[str]:
    return [
        f"seed {case.seed}: {outcome.kind}: {outcome.text}\n{outcome.differences[:5]}\n{program(case)}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if outcome.bad
    ]


def check_threads(seeds: range) -> None:
    cases = [draw(seed) for seed in seeds]
    assert failures(cases, [run_on_threads(case) for case in cases]) == []


def test_some_cases_on_threads() -> None:
    check_threads(range(8))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(10_000, 10_400, 100))
def test_many_cases_on_threads(first: int) -> None:
    check_threads(range(first, first + 100))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ON_PROCESSES)
@pytest.mark.parametrize("replicas", [False, True])
def test_many_cases_on_processes(transport: str, replicas: bool) -> None:
    for first in range(20_000, 20_060, 20):
        cases = [draw(seed, transport, 2, replicas) for seed in range(first, first + 20)]
        assert failures(cases, run_on_processes(cases)) == []


# The tools


@pytest.mark.slow
def test_a_seed_is_one_case_and_its_program_is_python() -> None:
    for seed in range(40):
        case = draw(seed)
        assert case == draw(seed)
        assert case.fits()
        compile(program(case), "case", "exec")


def test_what_is_left_out_is_not_drawn() -> None:
    for seed in range(100):
        case = draw(seed, without=("faults", "replay", "graph", "state", "random"))
        assert case.fault is None
        assert not case.whole
        assert not case.has("Count", "Mean", "BatchNorm", "Calls", "Seen", "Drop", "Noise")


@pytest.mark.slow
def test_smaller_cases_are_smaller_and_never_lead_back() -> None:
    for seed in (*range(20), *(seed for seed in range(400) if draw(seed).shared)):
        case = draw(seed)
        for other in smaller(case):
            if other != case and other.fits():
                assert case not in smaller(other)


def test_a_difference_is_shrunk_to_the_layer_that_makes_it() -> None:
    """Planted: whatever has a Square counts as wrong."""

    def run(cases: list[Case]) -> list[Outcome]:
        return [Outcome("differs" if case.has("Square") else "same") for case in cases]

    seed = next(seed for seed in range(1000) if draw(seed).has("Square"))
    found = shrink(draw(seed), Outcome("differs"), run)
    assert found.layers == (Layer("Square"),)
    assert (found.ranks, found.steps, found.microbatches, found.family, found.way) == (1, 1, 1, "gpipe", "list")


LATER = {"seed": 2, "sizes": (4, 4, 4), "steps": 3, "ranks": 2, "dtype": "float64"}


@pytest.mark.parametrize("loss", CHANGING)
def test_a_loss_that_is_trusted_after_its_first_step_is_noticed(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what later losses are divided by is not looked at, and no pair is asked again."""
    case = Case(((DENSE,), (DENSE,)), loss=loss, **LATER)
    outcome = run_on_threads(case)
    assert (outcome.kind, "microbatches" in outcome.text) == ("refused", True)
    monkeypatch.setattr(BatchShares, "check", lambda shares, _: shares())
    monkeypatch.setattr(LossCheck, "is_new", lambda *_: False)
    outcome = run_on_threads(case)
    assert outcome.kind == "differs"
    assert {name[:6] for name, _ in outcome.differences} == {"step 2"}


def test_a_loss_that_is_weighed_as_the_one_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: another loss is called, and the first one's weighing and checks go on."""
    case = Case(((DENSE,), (DENSE,)), loss="exchanged", **LATER)
    assert run_on_threads(case).kind == "same"
    make = Batches.set_loss

    def kept(batches: Batches, loss_fn: Any) -> None:
        if hasattr(batches, "weighing"):
            batches.loss_fn = loss_fn
        else:
            make(batches, loss_fn)

    monkeypatch.setattr(Batches, "set_loss", kept)
    assert run_on_threads(case).bad


def test_a_wrong_pipeline_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each microbatch's loss is seeded with twice its share."""
    from penstock.runtime.loss.losses import Seeds

    case = Case(((DENSE,), (DENSE,)), ranks=2, sizes=(2, 1))
    assert run_on_threads(case).kind == "same"
    make = Seeds.__init__

    def doubled(self: Seeds, shares: Any, count: int, scale: float, *rest: Any) -> None:
        make(self, shares, count, 2 * scale, *rest)

    monkeypatch.setattr(Seeds, "__init__", doubled)
    outcome = run_on_threads(case)
    assert outcome.kind == "differs"
    assert {name for name, _ in outcome.differences} >= {"step 0: gradient of 0.linear.weight"}
    assert all("off by 1 of the largest number" in text for name, text in outcome.differences if "gradient" in name)


def test_hooks_that_fire_too_often_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: both forwards of a recomputed stage run on one tensor; hooks do not wait for complete gradients."""
    from penstock.runtime.engine.stage import StageInput
    from penstock.runtime.state.transaction import ParametersBefore

    arriving = Case(((DENSE,), (Layer("HookedInput"),)), ranks=2, recompute="always")
    inside = Case(((DENSE,), (DENSE,)), ranks=2, optimizer="SGD", inside=True, steps=2)
    assert [run_on_threads(case).kind for case in (arriving, inside)] == ["same", "same"]
    monkeypatch.setattr(StageInput, "aliased", StageInput.with_own_containers)
    assert run_on_threads(arriving).kind == "differs"
    monkeypatch.setattr(ParametersBefore, "hold_hooks", lambda _: None)
    assert run_on_threads(inside).bad


@pytest.mark.slow
def test_a_program_runs_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(program(Case(((DENSE,), (Layer("Bias", 1),)), ranks=2, steps=2, optimizer="SGD")))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=500)
    assert done.stdout == "0 differences\n", done.stderr


def test_a_refusal_is_no_difference_and_an_error_of_the_model_is() -> None:
    shared = Case(((Layer("Count"),), (Layer("Count"),)), ranks=2, shared=((0, 1),), dtype="float64")
    outcome = run_on_threads(shared)
    assert (outcome.kind, outcome.bad) == ("refused", False)
    assert "have one Count" in outcome.text
    assert judged(ModelError("x"), True).kind == "refused"
    assert judged(ModelError("x"), False).bad, "of stages that a user has written, nothing is refused"
    assert judged(RunError("x"), True).bad
    assert Outcome("crashed", "KeyError: x").bad
    assert not Outcome("crashed", "KeyError: x").like(Outcome("crashed", "ValueError: y"))


@pytest.mark.slow
def test_a_container_that_is_not_looked_into_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every module counts as one that the model calls, so that a list in a dict was a single unit."""
    from penstock.model.replay import cut
    from penstock.model.replay.recording import units

    half = (DENSE, DENSE)
    cases = [Case((half, half), way="replay", dtype="float64", ranks=2, nest=nest) for nest in NESTS]
    assert [run_on_threads(case).kind for case in cases] == ["same"] * len(NESTS)
    monkeypatch.setattr(units, "has_forward", lambda module: True)
    monkeypatch.setattr(cut, "entered_units", lambda *given: None)
    found = {case.nest for case in cases if run_on_threads(case).kind == "differs"}
    assert found >= {"list in dict", "lists in list"}
