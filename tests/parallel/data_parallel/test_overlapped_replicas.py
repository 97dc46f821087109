"""`train_steps` with replicas: steps overlap, all replicas have the results of the loop by hand, and fail together.

Two replicas of a pipeline of two ranks, each on rows of its own. One group of four processes runs all scenarios; each
returns what its process saw.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline.loops import (
    BITES,
    LIMIT,
    OPTIMIZERS,
    QUIET,
    SPOILED,
    STEPS,
    batches,
    by_hand,
    differences,
    hold_back,
    overlapped,
    pipeline,
    press,
    state_of,
)
from processes import launch, on_processes
from torch import Tensor

import penstock
from penstock.errors import PeerFailure, PenstockError
from penstock.schedule import Action, Op

WHERE = "rank 1 of replica 1"
CASES = [
    ("zb-v", "adamw", None, False, QUIET),
    ("zb-h2", "sgd", 2.0, False, BITES),
    ("1f1b", "adamw", 2.0, False, BITES),
    ("zb-v", "adamw", 5.0, True, SPOILED),
    ("dualpipe-v", "sgd", None, True, SPOILED),
]


def replicated(schedule: str, **options: Any) -> penstock.Pipeline:
    ranks = dist.get_world_size() // 2
    return pipeline(schedule, ranks, mesh=penstock.mesh(pp=ranks, dp=2), dtype=torch.float64, **options)


def replica_of(pipe: penstock.Pipeline) -> int:
    return pipe.deployment.replication.index


def own_rows(pipe: penstock.Pipeline, scales: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each batch, this replica's rows: other ones, and mostly another number of them."""
    mine = slice(1, None) if replica_of(pipe) else slice(0, 8)
    return ((x[mine], y[mine]) for x, y in batches(scales, torch.float64))


def compared() -> dict[str, Any]:
    found = {}
    for family, name, clip, skip, scales in CASES:
        pair = []
        for way in (by_hand, overlapped):
            with replicated(family) as pipe:
                pair.append(way(pipe, own_rows(pipe, scales), name, clip, skip))
        found[f"{family} {name} {clip} {skip}"] = differences(*pair), pair[1]["losses"]
    return found


def ahead() -> tuple[list[float], list[str]]:
    with replicated("zb-h2") as pipe:
        hold_back(pipe, f"replica {replica_of(pipe)}")
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        results = list(pipe.train_steps(own_rows(pipe, QUIET), optimizer, clip=1e9))
        return [result.loss.item() for result in results], [result.together for result in results]


def repaired(disturbs: str) -> tuple[list[str], list[str]]:
    """One process is disturbed in its third step, in a part that others are ahead of; then all go on from there."""
    scales, made = [1.0, 1.0, 1.0, 40.0, 1.0, 1.0], []
    with replicated("zb-h2") as pipe:
        made.append(by_hand(pipe, own_rows(pipe, scales), "adamw", LIMIT, False))
    with replicated("zb-h2") as pipe:
        last, calls = [action for action in pipe.program.rows[1] if action.op is Op.W][-1], [0]

        def breaks(action: Action, context: Any) -> None:
            here = pipe.rank == 1 and replica_of(pipe) == 1 and action == last
            calls[0] += here
            if here and calls[0] == 3:
                if disturbs == "Ctrl-C":
                    press()
                else:
                    raise ValueError("broken on purpose")
            context.run(action)

        pipe.register("W", breaks)
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data, losses, norms, said = list(own_rows(pipe, scales)), {}, {}, []
        while (done := pipe.deployment.counter.step) < len(data):
            steps = pipe.train_steps(data[done:], optimizer, clip=LIMIT, scheduler=rate)
            try:
                for number, result in enumerate(steps, done):
                    losses[number], norms[number] = result.loss.item(), result.norm.item()
            except (KeyboardInterrupt, PenstockError) as error:
                said.append(f"{type(error).__name__}: {error}")
        for number in set(range(6)) - set(losses):  # the one before the disturbed step may not have come
            losses[number], norms[number] = made[0]["losses"][number], made[0]["norms"][number]
        seen = {"losses": [losses[each] for each in range(6)], "norms": [norms[each] for each in range(6)]}
        made.append({**seen, "updated": [True] * 6, "state": state_of(pipe, optimizer)})
    return said, differences(*made)


def of_different_number() -> str:
    """The second replica is given one batch less."""
    with replicated("1f1b", timeout=10.0) as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        try:
            for _ in pipe.train_steps(own_rows(pipe, [1.0] * (4 - replica_of(pipe))), optimizer):
                pass
        except PenstockError as error:
            return str(error)
        return "nothing raised"


class Breaking(torch.optim.SGD):
    """Fails in its third step."""

    breaks = False
    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        if self.breaks and self.done == 3:
            raise ValueError("an optimizer that breaks")
        return super().step(closure)


def failing_update() -> str:
    with replicated("zb-v") as pipe:
        optimizer = Breaking(pipe.parameters(), lr=0.01)
        optimizer.breaks = pipe.rank == 1 and replica_of(pipe) == 1
        try:
            for _ in pipe.train_steps(own_rows(pipe, QUIET), optimizer):
                pass
        except (PenstockError, ValueError) as error:
            return str(error)
        return "nothing raised"


def changed_on_one() -> str:
    """The body changes the weights of one replica: they would train apart."""
    with replicated("1f1b") as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        try:
            for number, _ in enumerate(pipe.train_steps(own_rows(pipe, [1.0] * 8), optimizer)):
                if number == 1 and replica_of(pipe) == 1 and pipe.rank == 1:
                    with torch.no_grad():
                        for parameter in pipe.parameters():
                            parameter.mul_(1.5)
        except PenstockError as error:
            return str(error)
        return "nothing raised"


def scenarios() -> dict[str, Any]:
    return {
        "compared": compared(),
        "ahead": ahead(),
        "failure": repaired("failure"),
        "Ctrl-C": repaired("Ctrl-C"),
        "update": failing_update(),
        "changed": changed_on_one(),
        "number": of_different_number(),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return on_processes(4, scenarios, limit=300.0)


@pytest.mark.slow
def test_replicas_whose_steps_overlap_train_as_the_loop_by_hand(seen):
    for process in seen:
        for case, (apart, losses) in process["compared"].items():
            assert not apart, case
            assert losses == seen[0]["compared"][case][1], case


@pytest.mark.slow
def test_the_ranks_of_a_replica_do_not_wait_for_each_other(seen):
    losses, together = seen[0]["ahead"]
    assert together == ["the first step of a pipeline", *[""] * (STEPS - 1)]
    assert all(process["ahead"] == (losses, together) for process in seen)


@pytest.mark.slow
def test_a_step_that_fails_in_one_replica_is_undone_in_all_and_training_can_go_on(seen):
    for process in seen:
        said, apart = process["failure"]
        assert len(said) == 1, said
        assert f"{WHERE} failed" in said[0]
        assert "broken on purpose" in said[0]
        assert not apart


@pytest.mark.slow
def test_ctrl_c_in_one_replica_ends_the_step_in_all_and_training_can_go_on(seen):
    kinds = [process["Ctrl-C"][0][0].partition(":")[0] for process in seen]
    assert sorted(kinds) == ["KeyboardInterrupt", *["PeerFailure"] * 3]
    assert not any(process["Ctrl-C"][1] for process in seen)


@pytest.mark.slow
def test_an_optimizer_that_fails_in_one_replica_is_named_by_all(seen):
    for process in seen:
        assert "an optimizer that breaks" in process["update"]


@pytest.mark.slow
def test_weights_that_are_changed_in_one_replica_are_found_by_all(seen):
    for process in seen:
        assert "parameter 1.linear.weight (or its gradient) was changed in the body" in process["changed"]
    others = [process for process in seen if "rank 1 of replica 1 failed: UsageError" in process["changed"]]
    assert len(others) >= len(seen) - 1  # the rank itself raises its own error


@pytest.mark.slow
def test_batches_of_different_number_in_replicas_are_named(seen):
    for process in seen:
        assert "different calls" in process["number"], process["number"]


def killed(say: Any) -> None:
    with replicated("zb-h2", timeout=20.0) as pipe:

        def dies(action: Action, context: Any) -> None:
            if replica_of(pipe) == 1 and pipe.rank == 1 and pipe.deployment.counter.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            context.run(action)

        pipe.register("W", dies)
        try:
            for _ in pipe.train_steps(own_rows(pipe, [1.0] * 6), OPTIMIZERS["sgd"](pipe.parameters()), clip=1e9):
                pass
        except PeerFailure as failure:
            say((failure.rank, failure.replica))


@pytest.mark.slow
def test_a_rank_of_a_replica_that_dies_is_named_by_all_others():
    endings = launch(4, killed)
    assert [ending.said for ending in endings if ending.code != -signal.SIGKILL] == [[(1, 1)]] * 3, endings


STALL = 5.0  # seconds


def stopped(say: Any) -> None:
    """The first rank of the second replica stands still at its end of a step, which all other ranks have ended."""
    with replicated("gpipe", timeout=STALL) as pipe:
        last = [action for action in pipe.program.rows[0] if action.op is Op.B][-1]

        def stands_still(action: Action, context: Any) -> None:
            if replica_of(pipe) == 1 and action == last and pipe.deployment.counter.step == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            context.run(action)

        pipe.register("B", stands_still)
        try:
            for _ in pipe.train_steps(own_rows(pipe, QUIET), OPTIMIZERS["sgd"](pipe.parameters())):
                pass
        except PeerFailure as failure:
            say((failure.rank, failure.replica, failure.cause))


@pytest.mark.slow
def test_a_pipeline_that_names_its_stalled_rank_tells_the_other_replicas():
    """They do not have to find out by themselves, which takes longer: a stalled process is looked for in its own
    pipeline first.
    """
    said = [ending.said for ending in launch(4, stopped) if ending.said]
    assert len(said) == 3, said
    for ((rank, replica, cause),) in said:
        assert (rank, replica) == (0, 1)
        assert f"silent for {STALL:g} s" in cause


@pytest.mark.slow
def test_two_processes_with_the_whole_model_each_train_as_the_loop_by_hand():
    for found in on_processes(2, compared_alone):
        assert found == []


def compared_alone() -> list[str]:
    pair = []
    for way in (by_hand, overlapped):
        with replicated("1f1b") as pipe:
            pair.append(way(pipe, own_rows(pipe, BITES), "adamw", 2.0, False))
    return differences(*pair)
