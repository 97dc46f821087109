"""Somebody reaches the store, or a connection, and writes what they like: nothing of it is run, and nothing hangs."""

from __future__ import annotations

import enum
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.bombs import loads_of
from processes import launch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError


class Colour(enum.Enum):
    RED = 1


class Painter(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x), Colour.RED


class Seer(nn.Linear):
    def forward(self, x: Any, colour: Any) -> Any:
        return super().forward(x)


def passes_an_enum(say: Callable[[Any], None], transport: str) -> None:
    pipe = penstock.Pipeline(
        [Painter(4, 4), Seer(4, 4)], microbatches=2, loss_fn=F.mse_loss, timeout=10, transport=transport
    )
    try:
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
        say("trained")
    except PenstockError as error:
        say(str(error))
    pipe.close()


def test_without_a_secret_only_processes_of_one_user_pass_each_other_pickles() -> None:
    for transport, answer in (("shared", "trained"), ("distributed", "can only travel pickled")):
        for ending in launch(2, passes_an_enum, transport):
            assert len(ending.said) == 1, ending.error
            assert answer in ending.said[0], ending.said


def trains_beside_a_stranger(say: Callable[[Any], None], path: str, only: str) -> None:
    """Rank 0 also plays a stranger who writes to every key that there is, and to those that a rank may read later."""
    store = dist.distributed_c10d._get_default_store()
    stop = threading.Event()

    def disturb() -> None:
        while isinstance(server := getattr(disturb, "store", store), dist.PrefixStore):
            disturb.store = server.underlying_store  # type: ignore[attr-defined]
        number = 0
        while not stop.is_set():
            names = [key for key in server.list_keys() if "penstock" in key]
            roots = {name[: name.index("penstock/") + len("penstock/0")] for name in names}
            names += [
                f"{root}/{word}"
                for root in roots
                for word in (only, "state/0", "state/1", "call/0", "seen/0", "compiling/0", "outside/1")
            ]
            for name in names:
                number += 1
                server.set(name, loads_of(path)[number % len(loads_of(path))])
            time.sleep(0.01)

    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss, timeout=10)
    thread = threading.Thread(target=disturb, daemon=True)
    if dist.get_rank() == 0:
        thread.start()
    try:
        for _ in range(100):
            pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
            time.sleep(0.02)
        say("trained")
    except PenstockError as error:
        say(str(error))
    stop.set()
    os._exit(0)


@pytest.mark.parametrize("key", ["verdict", "news/3", "alarm/0"])
def test_a_stranger_at_the_store_can_end_a_run_but_not_run_code(key: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        endings = launch(2, trains_beside_a_stranger, f"{folder}/boom", key, tcp=True)
        assert [ending.code for ending in endings] == [0, 0], [ending.error for ending in endings]
        for ending in endings:
            assert len(ending.said) == 1
            assert "somebody else writes to it" in ending.said[0], ending.said
        assert not Path(f"{folder}/boom").exists()
