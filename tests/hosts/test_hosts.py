"""A pipeline over several hosts: exact, by the right wires, as fast as predicted; and a host or a cable that is lost.

Which rank is named, and how soon, is what a person at a cluster of machines sees of such a loss.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts.network import network
from hosts.ranks import Ranks, ranks_on
from tiers import mostly_exhaustive
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.schedule import Costs, build, simulate

Say = Callable[[Any], None]
MICROBATCHES = 4
STEPS = 3
TIMEOUT = 4.0  # seconds until a silent rank counts as stalled
pytestmark = pytest.mark.timeout(600)


def model_of(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(stages)])


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator)


def pipeline(ranks: int, schedule: str = "1f1b") -> penstock.Pipeline:
    return penstock.Pipeline(
        model_of(ranks),
        stages=ranks,
        microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=F.mse_loss,
        timeout=TIMEOUT,
    )


def update(parameters: Iterable[nn.Parameter]) -> None:
    """SGD by hand: an optimizer of torch loads its compiler, three seconds of work on every rank."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def stepped(pipe: penstock.Pipeline, step: int) -> float:
    x, y = batch_of(step)
    loss = pipe.step(x, target=y).loss.item()
    update(pipe.parameters())
    return loss


def plain(stages: int, steps: int) -> list[float]:
    """Gradient accumulation in one thread."""
    model, losses = model_of(stages), []
    for step in range(steps):
        x, y = batch_of(step)
        parts = [
            F.mse_loss(model(one), other) / MICROBATCHES
            for one, other in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        ]
        for part in parts:
            part.backward()
        losses.append(float(sum(part.item() for part in parts)))
        update(model.parameters())
    return losses


# -- exact, by the right wires


def train(say: Say, ranks: int, schedule: str) -> None:
    with pipeline(ranks, schedule) as pipe:
        losses = [stepped(pipe, step) for step in range(STEPS)]
        wires = [pipe.deployment.world.describe_link(rank, rank + 1) for rank in range(ranks - 1)]
        say({"losses": losses, "wires": wires, "host": os.readlink("/proc/self/ns/net"), "table": pipe.describe()})


OFTEN = [(2, 2, "1f1b"), (4, 1, "zb-h1")]


@pytest.mark.parametrize(("count", "each", "schedule"), mostly_exhaustive([*OFTEN, (8, 1, "1f1b")], *OFTEN))
def test_losses_are_exact_and_each_link_has_its_own_wire(tmp_path: Path, count: int, each: int, schedule: str) -> None:
    with network(count) as hosts, ranks_on(hosts, each, train, tmp_path, count * each, schedule) as ranks:
        found = ranks.wait()
    assert len({rank["host"] for rank in found}) == count
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["losses"] == pytest.approx(plain(count * each, STEPS), rel=1e-5)
        for number, wire in enumerate(rank["wires"]):
            inside = number // each == (number + 1) // each
            assert wire.startswith("shared memory" if inside else "torch.distributed (gloo)"), rank["wires"]
            assert wire in rank["table"]


# -- lost


def train_on(say: Say, ranks: int = 4) -> None:
    """Steps without end, or until one fails: who is named then."""
    pipe, step = pipeline(ranks), 0
    try:
        while True:
            say(stepped(pipe, step))
            step += 1
            time.sleep(0.05)
    except PeerFailure as error:
        say({"named": error.rank, "cause": error.cause, "steps": step})
        os._exit(0)


def under_way(ranks: Ranks, steps: int = 3) -> int:
    """Wait until all have done so many steps more; how many rank 0 has done then."""
    before = len(ranks.said(0))
    ranks.until(lambda: all(len(ranks.said(rank)) >= before + steps for rank in range(ranks.count)))
    return len(ranks.said(0))


def named(ranks: Ranks, survivors: list[int], since: float) -> dict[int, tuple[int, float, str]]:
    """By survivor: whom it names, how many seconds after the loss, and why."""
    for rank in survivors:
        ranks.until(lambda rank=rank: isinstance(ranks.said(rank)[-1][1], dict))
    found = {}
    for rank in survivors:
        at, what = ranks.said(rank)[-1]
        found[rank] = (what["named"], at - since, what["cause"])
    print(found)
    return found


@pytest.mark.slow
def test_a_host_that_dies_is_named_at_once_and_a_cable_that_is_pulled_after_the_timeout(tmp_path: Path) -> None:
    """Ranks 0 and 1 are on the first host, 2 and 3 on the second. Of the two that are lost, the neighbour is named, on
    both of the others alike; ranks behind a pulled cable name the host of the store, which they cannot reach."""
    with network(2) as hosts:
        (tmp_path / "dies").mkdir()
        with ranks_on(hosts, 2, train_on, tmp_path / "dies") as ranks:
            under_way(ranks)
            since = time.monotonic()
            hosts[1].kill()
            found = named(ranks, [0, 1], since)
            assert found[0][0] == found[1][0]
            assert {who for who, _, _ in found.values()} <= {2, 3}, found
            assert all("connection closed" in why for _, _, why in found.values()), found  # and not for its silence
        (tmp_path / "pulled").mkdir()
        with ranks_on(hosts, 2, train_on, tmp_path / "pulled") as ranks:
            done = under_way(ranks)
            hosts[1].unplug()
            time.sleep(TIMEOUT / 4)
            hosts[1].plug()  # in time: nothing was lost but time
            under_way(ranks)
            hosts[1].unplug()
            since = time.monotonic()
            found = named(ranks, [0, 1, 2, 3], since)
            hosts[1].plug()
            assert {found[rank][0] for rank in (0, 1)} == {2}, found
            assert {found[rank][0] for rank in (2, 3)} <= {0, 1}, found
            assert all("silent" in found[rank][2] for rank in (0, 1)), found
            losses = [loss for _, loss in ranks.said(0)[:-1]]
            assert len(losses) > done
            assert losses == pytest.approx(plain(4, len(losses)), rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [0, 3, 7])
def test_one_of_eight_hosts_that_dies_is_named_by_the_seven_others(tmp_path: Path, lost: int) -> None:
    """The first of them has the store of the run, and the exchange that ends a step goes through it."""
    with network(8) as hosts, ranks_on(hosts, 1, train_on, tmp_path, 8) as ranks:
        done = under_way(ranks)
        since = time.monotonic()
        hosts[lost].kill()
        found = named(ranks, [rank for rank in range(8) if rank != lost], since)
        assert {who for who, _, _ in found.values()} == {lost}, found
        assert all("died or left" in why for _, _, why in found.values()), found
        assert max(seconds for _, seconds, _ in found.values()) < 20  # and not by a timeout of torch's
        losses = [loss for _, loss in ranks.said((lost + 1) % 8)[:done]]
    assert losses == pytest.approx(plain(8, len(losses)), rel=1e-5)


# -- as fast as predicted

COMPUTE = 0.05  # seconds of a forward; a backward takes two of them
DELAY = 0.016
TAKEN: dict[str, list[float]] = {"forward": [], "backward": []}


def sleep(kind: str, seconds: float) -> None:
    begin = time.monotonic()
    time.sleep(seconds)
    TAKEN[kind].append(time.monotonic() - begin)


class Slow(torch.autograd.Function):
    """Takes its time in both directions, without needing a processor for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep("forward", COMPUTE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sleep("backward", 2 * COMPUTE)
        return gradients


class SlowLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x * self.scale)  # type: ignore[no-any-return, no-untyped-call]


def hop() -> float:
    """Seconds of a bare message of gloo between the two ranks, whose receive was posted before."""
    taken, other = [], 1 - dist.get_rank()
    for _ in range(10):
        came = torch.zeros(8)
        posted = dist.irecv(came, other)
        assert posted is not None
        time.sleep(COMPUTE)
        begin = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(came, other)
        posted.wait()
        if dist.get_rank() == 1:
            dist.send(came, other)
        taken.append((time.monotonic() - begin) / 2)
    return statistics.median(taken)


def train_slowly(say: Say, ranks: int, microbatches: int) -> None:
    stages = nn.Sequential(*[SlowLayer() for _ in range(ranks)])
    with penstock.Pipeline(
        stages, stages=ranks, microbatches=microbatches, schedule="1f1b", loss_fn=F.mse_loss, timeout=60
    ) as pipe:
        x, seconds, hops = torch.ones(microbatches, 6), [], hop()
        for _ in range(4):
            begin = time.monotonic()
            pipe.step(x, target=x)
            seconds.append(time.monotonic() - begin)
        say({"steps": seconds, "hop": hops, **{kind: statistics.median(taken) for kind, taken in TAKEN.items()}})


@pytest.mark.slow
def test_a_step_under_delay_takes_what_was_predicted(tmp_path: Path) -> None:
    """Computes sleep, so that the load of the machine matters little, and the best step is the least disturbed one.
    The reports that end a step take some hops more than its schedule, so there are microbatches enough."""
    ranks, microbatches = 2, 12
    with network(ranks, delay=DELAY) as hosts, ranks_on(hosts, 1, train_slowly, tmp_path, ranks, microbatches) as group:
        found = group.wait()
    forward, backward = (statistics.mean(rank[kind] for rank in found) for kind in ("forward", "backward"))
    assert found[0]["hop"] > DELAY
    costs = Costs(forward=forward, input=backward / 2, weight=backward / 2, hop=found[0]["hop"])
    schedule = build("1f1b", ranks, microbatches)
    predicted = simulate(schedule, costs).makespan
    measured = min(map(max, zip(*(rank["steps"] for rank in found), strict=True)))  # of each step, the slower rank
    print(f"predicted {predicted:.3f} s, measured {measured:.3f} s; {found}")
    assert measured == pytest.approx(predicted, rel=0.1)
    assert simulate(schedule, replace(costs, hop=0.0)).makespan < 0.9 * measured  # so that the delay did matter


@pytest.mark.exhaustive
def test_a_cable_has_the_bandwidth_that_was_asked_for() -> None:
    sender = "import socket,sys; c=socket.create_connection((sys.argv[1], 5000)); c.sendall(bytes(1 << 20))"
    receiver = (
        "import socket,time; s=socket.create_server(('', 5000)); print('ready', flush=True); c,_=s.accept()\n"
        "begin=time.monotonic()\nwhile c.recv(1 << 16): pass\nprint(time.monotonic() - begin, flush=True)"
    )
    with network(2, rate=20e6) as hosts:
        listening = hosts[0].start([sys.executable, "-S", "-c", receiver], subprocess.PIPE)
        assert listening.stdout is not None
        assert listening.stdout.readline() == b"ready\n"
        hosts[1].start([sys.executable, "-S", "-c", sender, hosts[0].address]).wait(60)
        taken = float(listening.communicate()[0])
    assert taken > 0.35  # 8.4 Mbit, but for a first burst, at 20 Mbit/s
