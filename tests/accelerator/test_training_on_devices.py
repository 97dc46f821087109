"""Overlapped steps, checkpoints, replicas and shards on devices, against the plain loop on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from accelerator.test_exact_on_devices import on_processes, stages_of
from exactness.cases import WIDE, Case
from parallel.cases import Case as Replicated
from parallel.spread import Case as Spread
from parallel.tensor_parallel.test_spread import differences
from tiers import by_turns, mostly_exhaustive, mostly_slow

from penstock.schedule.builders import TRAINING


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_overlapped_steps_on_threads(name: str) -> None:
    cases = [Case(family, "mlp", stages=stages_of(family, 2), optimizer=True) for family in ("1f1b", "zb-v")]
    assert on_device("accelerator.training:faults_of_overlapped_steps", cases, name=name).value == []


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, "cuda"))
def test_overlapped_steps_on_processes(name: str) -> None:
    cases = [Case(family, "mlp", stages=stages_of(family, 2), optimizer=True) for family in ("1f1b", "zb-v")]
    outcomes = on_ranks(2, "accelerator.training:faults_of_overlapped_steps", cases, name=name, limit=25)
    assert [each.value for each in outcomes] == [[], []]


OVERLAPPED = "accelerator.training:faults_of_overlapped_steps"


@pytest.mark.slow
def test_overlapped_steps_of_every_family_on_threads() -> None:
    cases = [Case(family, "mlp", stages=stages_of(family, 2), optimizer=True) for family in TRAINING]
    assert on_device(OVERLAPPED, cases, limit=120).value == []


@pytest.mark.parametrize("ranks", mostly_exhaustive([2, 4], 4))
def test_overlapped_steps_of_every_family_on_processes(ranks: int) -> None:
    outcomes = on_ranks(ranks, OVERLAPPED, on_processes(ranks, TRAINING, "mlp", optimizer=True), limit=180)
    assert [each.value for each in outcomes] == [[]] * ranks


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_run_goes_on_from_a_checkpoint_on_its_devices(name: str) -> None:
    assert on_device("accelerator.training:faults_of_checkpoint", Case("1f1b", "mlp", stages=2), name=name).value == []


@pytest.mark.parametrize(("ranks", "family"), by_turns([2, 4], ["1f1b", "zb-v"]))
def test_processes_go_on_from_a_checkpoint_on_their_devices(ranks: int, family: str, tmp_path: Path) -> None:
    (case,) = on_processes(ranks, (family,), "mlp")
    outcomes = on_ranks(ranks, "accelerator.training:faults_of_checkpoint", case, str(tmp_path))
    assert [each.value for each in outcomes] == [[]] * ranks


@pytest.mark.parametrize("there", mostly_slow(["threads", "processes"], "threads"))
def test_a_checkpoint_of_two_devices_goes_on_on_four(there: str, tmp_path: Path) -> None:
    losses = "accelerator.training:losses_across_layouts"
    first = on_ranks(2, losses, str(tmp_path), 2, False)[-1].value
    arguments = (losses, str(tmp_path), 4, True)
    then = on_device(*arguments).value if there == "threads" else on_ranks(4, *arguments)[-1].value
    assert then == pytest.approx(first[1:], rel=1e-12)


@pytest.mark.parametrize(("name", "kind"), by_turns(NAMES, ["ddp", "fsdp"], fast=[("pretend", "fsdp")]))
def test_torchs_own_replicas_run_on_the_device(name: str, kind: str) -> None:
    for each in on_ranks(2, "accelerator.training:gradients_of_torchs_own_replicas", kind, name=name):
        assert each.value["worst"] < 1e-5
        assert each.value["races"] == []


@pytest.mark.parametrize(("name", "kind"), by_turns(NAMES, ["ddp", "fsdp"]))
def test_replicas_of_a_pipeline(name: str, kind: str) -> None:
    cases = [Replicated(family, kind, "mlp", optimizer=family in WIDE) for family in TRAINING]
    cases.append(Replicated("1f1b", kind, "tied", optimizer=True))  # not all of its parameters are sharded
    outcomes = on_ranks(4, "accelerator.training:faults_on_mesh", cases, name=name, limit=180)
    assert [each.value for each in outcomes] == [{}] * 4


@pytest.mark.slow
def test_tensors_that_are_spread_over_devices() -> None:
    cases = [Spread("1f1b"), Spread("1f1b", "loss"), Spread("zb-v", "sequence", stages=4)]
    outcomes = on_ranks(4, "accelerator.training:with_spread_tensors", cases, {"pp": 2, "tp": 2}, limit=120)
    assert [each.races for each in outcomes] == [[]] * 4
    for number, case in enumerate(cases):
        assert differences(case, [each.value[number] for each in outcomes], replicas=1) == []
