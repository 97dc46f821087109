"""A rank that is lost while the ranks connect, or build their pipelines, is named by all others.

Before there is a transport, ranks met in torch's own collectives: a rank that died then was an error of gloo's without
a name on all others, or a wait of half an hour.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ending, launch, state_of
from tiers import mostly_slow
from torch import nn

import penstock
from penstock.errors import ModelError, PeerFailure, PenstockError
from penstock.parallel.composition import Composition
from penstock.parallel.group import world
from penstock.pipeline import construction
from penstock.runtime.transport.distributed import device_link

Say = Callable[[Any], None]
SOON = 20.0  # seconds; torch's own timeout for the same wait is 60 or 1800


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pipeline(mesh: Any = None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    stages = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    return penstock.Pipeline(
        stages, stages=2, microbatches=2, loss_fn=nn.functional.mse_loss, mesh=mesh, timeout=10, **options
    )


def told(say: Say, work: Callable[[], Any]) -> None:
    """Say how it ended: the failure's rank, replica and words, and after how many seconds."""
    begin = time.monotonic()
    try:
        work()
    except PenstockError as error:
        place = (error.rank, error.replica) if isinstance(error, PeerFailure) else None
        say((place, str(error), time.monotonic() - begin))
    os._exit(0)  # not through torch's own end of a group that is broken


def named(endings: list[Ending], victim: int) -> list[tuple[Any, str]]:
    """By survivor: who is named, and in which words; all must have been quick."""
    assert endings[victim].code == -signal.SIGKILL
    found = []
    for rank, ending in enumerate(endings):
        if rank != victim:
            assert ending.said, (rank, ending.code, ending.error[-2000:])
            place, text, seconds = ending.said[0]
            assert seconds < SOON
            found.append((place, text))
    return found


def mesh_without(say: Say, victim: int) -> None:
    if dist.get_rank() == victim:
        die()
    told(say, lambda: penstock.mesh(pp=2, dp=2))


def test_a_rank_that_dies_before_the_mesh_is_made_is_named() -> None:
    """As by the kernel, while it builds its model. The others waited in torch's own calls, for half an hour."""
    for place, text in named(launch(4, mesh_without, 2), 2):
        assert place == (2, None)
        assert "died or left (its connection closed)" in text
        assert "in an exchange of mesh()" in text


def cut_without(say: Say, victim: int, where: str, replicas: int) -> None:
    mesh = penstock.mesh(pp=2, dp=replicas) if replicas > 1 else None
    if dist.get_rank() == victim:
        if where == "measure":
            world.World.meeting = lambda _: die()  # type: ignore[assignment, method-assign]
        else:
            Composition.link = lambda *_: die()  # type: ignore[assignment, method-assign]
    told(say, lambda: pipeline(mesh, balance="time", example=(torch.ones(2, 4),)))


@pytest.mark.parametrize(
    ("where", "replicas", "victim"),
    mostly_slow([("measure", 1, 1), ("measure", 1, 0), ("measure", 2, 1), ("link", 2, 3)], ("measure", 1, 1)),
)
def test_a_rank_that_dies_while_the_model_is_cut_is_named(where: str, replicas: int, victim: int) -> None:
    """With balance="time", all ranks take the numbers of one. They met in a collective of gloo, which names nobody."""
    found = named(launch(2 * replicas, cut_without, victim, where, replicas), victim)
    rank, replica = divmod(victim, replicas)
    for place, text in found:
        assert place == (rank, replica if replicas > 1 else None), text
        assert "died or left (its connection closed)" in text
        assert "in an exchange of Pipeline()" in text


def refuse_to_cut(say: Say) -> None:
    def cut(*_: Any, **__: Any) -> None:
        raise ModelError("a layer that only this rank has cannot be cut")

    if dist.get_rank() == 1:
        construction.cut_model = cut  # type: ignore[assignment]
    told(say, lambda: pipeline(balance="time", example=(torch.ones(2, 4),)))


def test_a_rank_that_cannot_cut_its_model_is_named_with_its_reason() -> None:
    """The others waited for its numbers, until their timeout."""
    (place, text, seconds), (_, own, _) = (ending.said[0] for ending in launch(2, refuse_to_cut))
    assert place == (1, None)
    assert "rank 1 failed: it could not build its pipeline: ModelError: a layer that only this rank has" in text
    assert own == "a layer that only this rank has cannot be cut"
    assert seconds < SOON


def describe_without_store(say: Say) -> None:
    pipe = pipeline()
    pipe.deployment.world.all_gather("all are here", None)
    if dist.get_rank() == 0:
        die()
    time.sleep(1.0)
    told(say, pipe.describe)


def test_a_description_names_the_rank_that_took_the_store_with_it() -> None:
    """Ranks look up in the store which links they have. That was an error of the store's."""
    ((place, text),) = named(launch(2, describe_without_store, tcp=True), 0)
    assert place == (0, None)
    assert "died or left" in text


def connect_without(say: Say) -> None:
    os.environ["PENSTOCK_TRANSPORT"] = "distributed"
    pipe, x = pipeline(), torch.ones(4, 4)
    others = pipe.deployment.world.all_gather("all are here", os.getpid())

    def refused(*_: Any) -> None:
        if dist.get_rank() == 1:
            die()
        while (state := state_of(others[1])) is not None and state[0] not in "ZX":
            time.sleep(0.01)
        raise RuntimeError("connect: Connection refused")

    device_link.dist = SimpleNamespace(**{**vars(dist), "ProcessGroupGloo": refused})
    told(say, lambda: pipe.step(x, target=x))


def test_a_rank_that_dies_while_a_second_connection_is_made_is_named_and_not_its_peer() -> None:
    """Gloo's connection was refused at once, and the rank that lived said of itself that it could not connect."""
    ((place, text),) = named(launch(2, connect_without), 1)
    assert place == (1, None)
    assert "died or left (its connection closed) while rank 0 waited for their second connection" in text
