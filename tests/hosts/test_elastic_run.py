"""`penstock train` on hosts of which one is lost and comes back: elastic, and not."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.network import Host, network
from processes import SECRET
from tiers import mostly_exhaustive
from torch import nn

from penstock.tools.train.run.metrics import read_metrics

# Batches come as far as the file `limit` allows, so that a test decides how far a run gets before something happens.
RUN = """
import time, torch
from pathlib import Path
from torch import nn

torch.set_default_dtype(torch.float64)

def model():
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), nn.functional.mse_loss

def rows(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)

class Data:
    def batch(self, number):
        while number >= int(Path("limit").read_text() or 0):
            time.sleep(0.02)
        return rows(number)
"""
SETTINGS = [
    "model.source=small_run:model",
    "data.source=small_run:Data",
    "data.batch=8",
    "pipeline.microbatches=2",
    "pipeline.timeout=20",
    "optimizer.name=sgd",
    "optimizer.lr=0.1",
    "optimizer.warmup=0",
    "optimizer.decay=constant",
    "optimizer.weight_decay=0",
    "optimizer.clip=1e9",
    "evaluation.every=0",
    "checkpoint.every=2",
    "logging.every=1",
    "logging.tensorboard=off",
    "output=run",
    "training.steps=18",
]
LIMIT = 200.0
pytestmark = pytest.mark.timeout(900)


def plain(steps: int) -> list[float]:
    """The same training in one thread."""
    there: dict[str, Any] = {}
    before = torch.get_default_dtype()
    try:
        exec(RUN, there)
        torch.manual_seed(0)
        model, losses = there["model"]()[0], []
    finally:
        torch.set_default_dtype(before)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return losses


class HostsRun:
    """A run on several hosts: `torchrun` on each, started and lost one by one."""

    def __init__(self, hosts: list[Host], folder: Path, meeting: list[str], settings: list[str]) -> None:
        self.hosts, self.folder = hosts, folder
        self._meeting, self._settings = meeting, settings
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "small_run.py").write_text(RUN)

    def start(self, number: int) -> None:
        host = self.hosts[number]
        meeting = [
            each.replace("NUMBER", str(number)).replace("IS_HOST", str(int(number == 1))) for each in self._meeting
        ]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *meeting]
        command += [f"--local-addr={host.address}", "-m", "penstock", "train", *SETTINGS, *self._settings]
        environment = {"PENSTOCK_SECRET": SECRET, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"host{number}.txt").open("ab") as log:
            self.agents[number] = host.start(command, log, cwd=self.folder, env=environment)

    def allow(self, steps: int) -> None:
        (self.folder / "limit").write_text(str(steps))

    def losses(self) -> list[float]:
        path = self.folder / "run" / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def words(self, number: int | None = None) -> str:
        numbers = range(len(self.hosts)) if number is None else [number]
        paths = [self.folder / f"host{each}.txt" for each in numbers]
        return "".join(path.read_text() for path in paths if path.exists())

    def until(self, ready: Callable[[], bool]) -> float:
        """Wait, and say for how many seconds."""
        begin = time.monotonic()
        while not ready():
            assert time.monotonic() - begin < LIMIT, self.words()[-6000:]
            time.sleep(0.02)
        return time.monotonic() - begin

    def finish(self) -> None:
        codes = [agent.wait(LIMIT) for agent in self.agents.values()]
        assert codes == [0] * len(codes), self.words()[-6000:]


def names_lost(rank: int, words: str) -> bool:
    """Whether a run has said that it lost this rank, in the middle of a step, between two, or among replicas."""
    return re.search(rf"rank {rank}( of replica \d+)? failed( \(.*\))?: died or left", words) is not None


FEWER_REPLICAS = (("pipeline.ranks=1", "mesh.replicas=2"), "1 rank, 1 stage, 4 microbatches, of 1 rank x 2 replicas")
FEWER_RANKS = (("pipeline.ranks=2",), "1 rank, 2 stages, 2 microbatches, of 2 ranks, 2 stages")


@pytest.mark.parametrize(("settings", "layout"), mostly_exhaustive([FEWER_REPLICAS, FEWER_RANKS], FEWER_REPLICAS))
def test_an_elastic_run_goes_on_without_a_host_and_grows_when_it_is_back(
    tmp_path: Path, settings: tuple[str, ...], layout: str
) -> None:
    """The host that is lost has rank 0, and torchrun's rendezvous is on the other. The loss of every step is that of
    one undisturbed process."""
    with network(2) as hosts:
        meeting = ["--nnodes=1:2", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        meeting += [f"--rdzv-endpoint={hosts[1].address}:29577", "--rdzv-conf"]
        meeting += ["is_host=IS_HOST,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"]
        run = HostsRun(hosts, tmp_path, meeting, ["launch.elastic=true", *settings])
        run.allow(1000)
        run.start(1)
        run.start(0)
        run.until(lambda: len(run.losses()) >= 4)
        run.allow(12)
        since = time.monotonic()
        hosts[0].kill()
        run.until(lambda: names_lost(0, run.words(1)))
        named = time.monotonic() - since
        smaller = run.until(lambda: f"elastic: {layout}" in run.words(1))
        run.until(lambda: len(run.losses()) == 12)
        run.start(0)
        grown = run.until(lambda: "resuming from step 12" in run.words(0))
        run.allow(1000)
        run.finish()
        print(f"named after {named:.1f} s, on with fewer after {smaller:.1f} s more, grown after {grown:.1f} s")
        assert "penstock: rank 0" in run.words(1)
        assert "resuming from step" in run.words(1)
        assert run.losses() == pytest.approx(plain(18), rel=1e-10)


@pytest.mark.exhaustive
def test_a_process_without_a_place_in_the_smaller_layout_stands_by(tmp_path: Path) -> None:
    """Three stages that are fixed have a layout for three processes and for one. Once, the two that were left of three
    hosts found no layout for two, and every attempt failed until there were no restarts left."""
    with network(3) as hosts:
        meeting = ["--nnodes=1:3", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        meeting += [f"--rdzv-endpoint={hosts[1].address}:29577", "--rdzv-conf"]
        meeting += ["is_host=IS_HOST,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"]
        run = HostsRun(hosts, tmp_path, meeting, ["launch.elastic=true", "pipeline.ranks=3", "pipeline.stages=3"])
        run.allow(4)
        for number in (1, 0, 2):
            run.start(number)
        run.until(lambda: len(run.losses()) == 4)
        hosts[2].kill()
        del run.agents[2]
        run.allow(1000)
        run.finish()  # also on the host that stands by
        assert "1 rank, 3 stages, 2 microbatches, of 3 ranks, 3 stages" in run.words()
        assert "processes that stand by: 1" in run.words()
        assert run.losses() == pytest.approx(plain(18), rel=1e-10)


@pytest.mark.exhaustive
def test_a_run_that_is_not_elastic_resumes_when_its_host_is_back(tmp_path: Path) -> None:
    """With torchrun's static rendezvous a host that is lost ends the run; started anew, it resumes."""
    with network(2) as hosts:
        meeting = ["--nnodes=2", "--node-rank=NUMBER", f"--master-addr={hosts[0].address}", "--master-port=29577"]
        run = HostsRun(hosts, tmp_path, meeting, ["pipeline.ranks=2"])
        run.allow(1000)
        for number in (0, 1):
            run.start(number)
        run.until(lambda: len(run.losses()) >= 4)
        run.allow(10)
        hosts[1].kill()
        assert run.agents[0].wait(LIMIT) == 1, run.words(0)
        assert names_lost(1, run.words(0))
        run.agents.clear()
        run.allow(1000)
        for number in (0, 1):
            run.start(number)
        run.finish()
        assert "resuming from step" in run.words(0)
        assert run.losses() == pytest.approx(plain(18), rel=1e-10)


@pytest.mark.exhaustive
def test_a_run_whose_cable_is_pulled_ends_on_both_hosts_and_resumes(tmp_path: Path) -> None:
    """Nothing arrives any more, and nobody is told: each side takes the other for lost.

    With the cable back, the run resumes.
    """
    with network(2) as hosts:
        meeting = ["--nnodes=2", "--node-rank=NUMBER", f"--master-addr={hosts[0].address}", "--master-port=29577"]
        run = HostsRun(hosts, tmp_path, meeting, ["pipeline.ranks=2", "pipeline.timeout=6"])
        run.allow(6)
        for number in (0, 1):
            run.start(number)
        run.until(lambda: len(run.losses()) >= 6)
        since = time.monotonic()
        hosts[1].unplug()
        run.allow(1000)
        named = [run.until(lambda number=number: "penstock: rank" in run.words(number)) for number in (0, 1)]
        for number in (0, 1):
            assert run.agents[number].wait(LIMIT) == 1, run.words(number)
        print(f"named after {named[0]:.1f} and {sum(named):.1f} s, ended after {time.monotonic() - since:.1f} s")
        for number in (0, 1):
            assert f"penstock: rank {1 - number} failed" in run.words(number), run.words(number)
        hosts[1].plug()
        run.agents.clear()
        for number in (0, 1):
            run.start(number)
        run.finish()
        assert "resuming from step" in run.words(0)
        assert run.losses() == pytest.approx(plain(18), rel=1e-10)
