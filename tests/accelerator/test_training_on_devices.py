"""Overlapped steps, checkpoints, replicas and shards on devices, against the plain loop on one device."""

from __future__ import annotations

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from accelerator.test_exact_on_devices import stages_of
from exactness.cases import Case
from parallel.cases import Case as Replicated
from tiers import by_turns, mostly_exhaustive, mostly_slow


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_overlapped_steps_on_threads(name: str) -> None:
    cases = [Case(family, "mlp", stages=stages_of(family, 2), optimizer=True) for family in ("1f1b", "zb-v")]
    assert on_device("accelerator.training:faults_of_overlapped_steps", cases, name=name).value == []


@pytest.mark.parametrize("name", mostly_exhaustive(NAMES, "cuda"))
def test_overlapped_steps_on_processes(name: str) -> None:
    cases = [Case(family, "mlp", stages=stages_of(family, 2), optimizer=True) for family in ("1f1b", "zb-v")]
    outcomes = on_ranks(2, "accelerator.training:faults_of_overlapped_steps", cases, name=name, limit=25)
    assert [each.value for each in outcomes] == [[], []]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_run_goes_on_from_a_checkpoint_on_its_devices(name: str) -> None:
    assert on_device("accelerator.training:faults_of_checkpoint", Case("1f1b", "mlp", stages=2), name=name).value == []


@pytest.mark.parametrize(("name", "kind"), by_turns(NAMES, ["ddp", "fsdp"], fast=[("pretend", "fsdp")]))
def test_torchs_own_replicas_run_on_the_device(name: str, kind: str) -> None:
    for each in on_ranks(2, "accelerator.training:gradients_of_torchs_own_replicas", kind, name=name):
        assert each.value["worst"] < 1e-5
        assert each.value["races"] == []


@pytest.mark.parametrize(("name", "kind"), by_turns(NAMES, ["ddp", "fsdp"]))
def test_replicas_of_a_pipeline(name: str, kind: str) -> None:
    cases = [Replicated("1f1b", kind, "mlp"), Replicated("zb-v", kind, "mlp", optimizer=True)]
    outcomes = on_ranks(4, "accelerator.training:faults_on_mesh", cases, name=name, limit=30)
    assert [each.value for each in outcomes] == [{}] * 4
