"""Which transport a pipeline gets: by itself, by argument, by the environment; and that it says so."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.parallel.group.world import World
from penstock.runtime.transport import ThreadTransport, Transport

CHOICES = [
    (None, ""),
    ("shared", ""),
    ("distributed", ""),
    (None, "distributed"),
    ("shared", "distributed"),
    (None, "Shared "),
]


def pipeline(transport: str | None = None, **options: Any) -> penstock.Pipeline:
    stages = [nn.Linear(4, 4) for _ in range(2)]
    return penstock.Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss, transport=transport, **options)


def links_of(pipe: penstock.Pipeline) -> str:
    return next(line for line in pipe.describe().splitlines() if line.startswith("links")).removeprefix("links").strip()


def choose() -> dict[str, str]:
    """What `describe` says of the links, before and after a step."""
    found = {}
    for argument, variable in CHOICES:
        os.environ["PENSTOCK_TRANSPORT"] = variable
        with pipeline(argument) as pipe:
            before = links_of(pipe)
            pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
            assert links_of(pipe) == before
            found[f"{argument} {variable}"] = before
    os.environ["PENSTOCK_TRANSPORT"] = ""
    return found


def test_ranks_on_one_host_share_memory_unless_told_otherwise() -> None:
    shared, gloo = "0 -> 1, 1 -> 0: shared memory", "0 -> 1, 1 -> 0: torch.distributed (gloo)"
    for found in on_processes(2, choose):
        assert found == {
            "None ": shared,
            "shared ": shared,
            "distributed ": gloo,
            "None distributed": gloo,
            "shared distributed": shared,
            "None Shared ": shared,
        }


def differ() -> str:
    try:
        pipeline("distributed" if dist.get_rank() else None)
    except UsageError as error:
        return str(error)
    return "no error"


def test_ranks_that_chose_differently_are_told_before_the_first_step() -> None:
    for said in on_processes(2, differ):
        assert "transport: rank 1 has distributed, rank 0 has no choice" in said


def test_threads_need_no_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRANSPORT", "threads")
    with pipeline() as pipe:
        assert "0 -> 1, 1 -> 0: handed over in memory" in links_of(pipe)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("pigeon", "PENSTOCK_TRANSPORT=pigeon: choose one of 'threads', 'shared', 'distributed'"),
        ("shared", "PENSTOCK_TRANSPORT=shared needs a process group: start with torchrun"),
        ("distributed", "PENSTOCK_TRANSPORT=distributed needs a process group"),
    ],
)
def test_an_environment_that_cannot_work_is_named(value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TRANSPORT", value)
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        pipeline()


def test_a_group_and_threads_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="pass a process group of torch"):
        pipeline("threads", group=object())


def test_any_transport_hears_which_call_its_rank_is_in_and_says_what_carries_values() -> None:
    """Not only those that have a thread to watch for failures."""
    transport: Transport = ThreadTransport.group(2)[0]
    world = World(None, 2, 1.0)
    world.transport = transport
    with world.calling("step()"):
        with world.calling("inner()"):
            assert transport.call == "step()"
        assert transport.call == "step()"
    assert transport.call == ""
    assert world.describe_link(0, 1) == "handed over in memory, without a copy"
