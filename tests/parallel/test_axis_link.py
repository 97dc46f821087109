"""A process of one replica dies, stops or leaves: every process of every replica names it, and none waits for ever."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deadlines import SOON, TIMEOUT
from faults.traps import KILL, STOP
from processes import Ending, launch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.parallel.axis_link import LATER_SECONDS

WIDTH, M = 4, 4
SHORT = 10.0  # the timeout where it is what ends the wait: of all steps, and the first has much to set up
STUCK = SHORT + 13  # seconds for which a rank is stuck: beyond what the others wait
Say = Callable[[Any], None]


class Trap(nn.Linear):
    """Springs in the second step."""

    spring: Callable[[], None] | None = None
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.spring is not None and self.calls == M + 2:
            self.spring()
        return torch.tanh(super().forward(input))


def lose(say: Say, replicate: str, how: int | str, rank: int, replica: int, schedule: str) -> None:
    mesh = penstock.mesh(pp=2, dp=2)
    torch.manual_seed(0)
    modules = [Trap(WIDTH, WIDTH) for _ in range(4 if schedule == "zb-v" else 2)]
    pipe = penstock.Pipeline(
        modules,
        microbatches=M,
        schedule=schedule,
        loss_fn=F.mse_loss,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=replicate),
        timeout=TIMEOUT if how in (KILL, "exit") else SHORT,
    )

    def spring() -> None:
        say(("fault", time.monotonic()))
        if how == "exit":
            sys.exit(3)
        if how == "stick":
            time.sleep(STUCK)
        elif how in ("stick elsewhere", "stop elsewhere"):  # in a wait for other groups, as its pipeline sees it
            with pipe.deployment.world.transport.in_other_group(lambda failure: None):
                time.sleep(STUCK if how == "stick elsewhere" else 1)
                os.kill(os.getpid(), STOP)
        else:
            os.kill(os.getpid(), int(how))

    if (mesh.get_local_rank("pp"), mesh.get_local_rank("dp")) == (rank, replica):
        next(iter(pipe.deployment.ranks.modules().values())).spring = spring  # type: ignore[assignment]
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)
    pipe.zero_grad()
    try:
        pipe.step(x, target=x)
    except PeerFailure as error:
        say((time.monotonic(), error.rank, error.replica, str(error)))
    try:
        pipe.step(x, target=x)
    except PeerFailure as error:
        say(str(error))
    sys.stderr.flush()
    os._exit(0)


def lose_a_shard(say: Say, how: int | str, rank: int, shard: int) -> None:
    """The same where tensors are spread: the others wait in the middle of a stage, in DTensor's own collectives."""
    mesh = penstock.mesh(pp=2, tp=2)
    torch.manual_seed(0)
    layers = [nn.Sequential(Trap(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    pipe = penstock.Pipeline(
        layers,
        microbatches=M,
        loss_fn=F.mse_loss,
        mesh=mesh,
        timeout=SHORT if how == STOP else TIMEOUT,
        parallel_options=penstock.ParallelOptions(tensor_plan={"*.1": "colwise", "*.2": "rowwise"}),
    )

    def spring() -> None:
        say(("fault", time.monotonic()))
        if how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), int(how))

    if (mesh.get_local_rank("pp"), mesh.get_local_rank("tp")) == (rank, shard):
        next(iter(pipe.deployment.ranks.modules().values()))[0].spring = spring
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)
    try:
        pipe.step(x, target=x)
    except PeerFailure as error:
        say((time.monotonic(), error.rank, error.shard, str(error)))
    try:
        pipe.step(x, target=x)
    except PeerFailure as error:
        say(str(error))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank", "shard"), [("raise", 1, 0), (KILL, 1, 1), (STOP, 0, 0)])
def test_a_lost_shard_is_named_where_the_others_wait_in_the_middle_of_a_stage(how: Any, rank: int, shard: int) -> None:
    endings = launch(4, lose_a_shard, how, rank, shard)
    if how == "raise":  # the one that raises names itself too
        victim = rank * 2 + shard
        text = endings[victim].said[1][3]
        assert "ValueError: boom" in text
        endings[victim].said = endings[victim].said[:1]
    check(endings, rank, shard, SOON + (SHORT if how == STOP else 0))
    if how == "raise":
        assert all("ValueError: boom" in ending.said[0][3] for ending in endings if len(ending.said) > 1)


def check(endings: list[Ending], rank: int, replica: int, seconds: float) -> None:
    victim = rank * 2 + replica  # neighbours in dp are neighbours in rank
    begun = endings[victim].said[0][1]
    for number, ending in enumerate(endings):
        if number != victim:
            assert ending.code == 0, (number, ending.code, ending.said, ending.error[-3000:])
            told, who, where, text = ending.said[0]
            assert (who, where) == (rank, replica), (number, text)
            assert told - begun < seconds, (number, text)
            assert "the group must be rebuilt" in ending.said[1], (number, ending.said[1])


@pytest.mark.parametrize(
    ("replicate", "how", "rank", "replica", "schedule"),
    [
        ("ddp", KILL, 1, 1, "1f1b"),
        pytest.param("ddp", KILL, 0, 0, "zb-v", marks=pytest.mark.slow),
        pytest.param("fsdp", KILL, 0, 1, "zb-v", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process(replicate: str, how: int, rank: int, replica: int, schedule: str) -> None:
    check(launch(4, lose, replicate, how, rank, replica, schedule), rank, replica, SOON)


@pytest.mark.parametrize(
    ("replicate", "how", "rank", "replica", "schedule"),
    [
        pytest.param("ddp", STOP, 1, 1, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param("fsdp", STOP, 0, 1, "1f1b", marks=pytest.mark.slow),
        pytest.param("fsdp", "stick", 1, 0, "zb-v", marks=pytest.mark.exhaustive),
    ],
)
def test_a_process_that_stops(replicate: str, how: Any, rank: int, replica: int, schedule: str) -> None:
    check(launch(4, lose, replicate, how, rank, replica, schedule), rank, replica, SHORT + SOON)


@pytest.mark.slow
def test_a_process_that_stops_while_it_waits_for_other_replicas_is_found_by_its_pipeline() -> None:
    endings = launch(4, lose, "ddp", "stop elsewhere", 0, 1, "1f1b")
    check(endings, 0, 1, SHORT + SOON)
    assert f"silent for {SHORT:g} s, stopped or dead" in endings[3].said[0][3]  # not by the replicas' later watch


@pytest.mark.exhaustive
def test_who_waits_in_its_pipeline_is_not_blamed_by_the_other_replicas() -> None:
    """Rank 0 of replica 1 is stuck; its pipeline takes it for waiting, and its neighbour there is not at fault."""
    check(launch(4, lose, "ddp", "stick elsewhere", 0, 1, "1f1b"), 0, 1, SHORT + LATER_SECONDS + SOON)


@pytest.mark.slow
def test_a_process_that_leaves_tells_the_others_why() -> None:
    endings = launch(4, lose, "fsdp", "exit", 1, 0, "1f1b")
    begun = endings[2].said[0][1]
    assert endings[2].code == 3
    for number in (0, 1, 3):
        told, who, where, text = endings[number].said[0]
        assert (who, where) == (1, 0)
        assert "SystemExit: 3" in text
        assert told - begun < SOON
