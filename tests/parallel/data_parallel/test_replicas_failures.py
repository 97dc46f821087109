"""A failure in one replica is one for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deadlines import SOON
from kept_processes import KeptProcesses
from parallel.data_parallel.replicas import (
    KINDS,
    attempt,
    batch,
    boom,
    gradients,
    own,
    pipeline,
)

import penstock
from penstock import ParallelOptions


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    """Replica 0 and 1 of rank 0, then of rank 1."""
    with KeptProcesses(4) as kept:
        yield kept


def failures() -> Any:
    """One rank of one replica raises, in the forward of any of its stages; then a step that must be exact."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    found = []
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            wanted = gradients(pipe)
            pipe.zero_grad()
            for stage, replica in ((0, 0), (2, 1), (3, 1)):
                if stage in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == replica:
                    pipe.deployment.ranks.modules()[stage].traps = iter([boom])
                said = attempt(pipe.step, x, target=y)
                clean = all(parameter.grad is None for parameter in pipe.parameters())
                pipe.step(x, target=y)
                exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
                pipe.zero_grad()
                found.append((kind, stage, replica, said, clean, exact))
            # a batch that is refused on one replica only
            short = x[:2] if mesh.get_local_rank("dp") == 1 else x
            said = attempt(pipe.step, short, target=y)
            pipe.step(x, target=y)
            exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
            found.append((kind, "batch", 1, said, True, exact))
            said = attempt(pipe.evaluate, x, colour=y) if mesh.get_local_rank("dp") else attempt(pipe.evaluate, x)
            pipe.zero_grad()
            pipe.step(x, target=y)
            exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
            found.append((kind, "evaluate", 1, said, True, exact))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_one_replica_is_named_by_all_at_once_and_the_next_step_is_exact(
    ranks: KeptProcesses, kind: str
) -> None:
    of_stage = {0: 0, 2: 1, 3: 0}
    for rank in ranks.found(failures):
        cases = [case for case in rank if case[0] == kind]
        assert len(cases) == 5
        for _, stage, replica, (name, text, named, seconds), clean, exact in cases[:3]:
            assert (name, named, clean, exact) == ("PeerFailure", replica, True, True)
            assert f"rank {of_stage[stage]} of replica {replica} failed (stage {stage}, action {stage}F0" in text
            assert "ValueError: boom" in text
            assert seconds < SOON
        for _, _, _, (name, text, _, seconds), _, exact in cases[3:]:
            assert name in ("ModelError", "PeerFailure")
            assert "argument 0 has 2 rows" in text or "'target' has 6 rows" in text or "'colour'" in text
            assert exact
            assert seconds < SOON


def a_failed_step_keeps_what_was_added_before() -> Any:
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    found = []
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            before = gradients(pipe)
            if 3 in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == 1:
                pipe.deployment.ranks.modules()[3].traps = iter([boom])
            said = attempt(pipe.step, x, target=y)
            found.append((said[0], all(torch.equal(before[name], value) for name, value in gradients(pipe).items())))
            if 3 in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == 0:
                pipe.deployment.ranks.modules()[3].traps = iter([boom])
            said = attempt(pipe.evaluate, x, target=y)
            found.append((said[0], all(torch.equal(before[name], value) for name, value in gradients(pipe).items())))
    return found


def test_a_failed_step_keeps_the_gradients_of_earlier_ones(ranks: KeptProcesses) -> None:
    for rank in ranks.found(a_failed_step_keeps_what_was_added_before):
        assert rank == [("PeerFailure", True)] * 4
