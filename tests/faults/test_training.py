"""`penstock train` and everything that may happen to it: the culprit is named, the losses are those of an undisturbed
run bit for bit, every checkpoint is whole or not there, and no process is left."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_port, state_of
from tiers import mostly_exhaustive
from train_jobs import TINY, Job, gone, job, prepare, undisturbed

from penstock.checkpoint.disk.manifest import checkpoints_in, damages, read_manifest
from penstock.tools.train.launch.stopping import ECHO_SECONDS
from penstock.tools.train.run.metrics import read_metrics

pytestmark = pytest.mark.timeout(1200)  # whole jobs, several each; a busy machine takes its time


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), 24)


def assert_whole(output: Path) -> None:
    """What has the name of a checkpoint is one, to the last bit."""
    found = checkpoints_in(output / "checkpoints")
    assert found
    for named in found:
        assert list(damages(named.path, read_manifest(named.path), sums=True)) == []


def plan(*traps: tuple[int, int, str]) -> str:
    return f"data.options.plan={[list(trap) for trap in traps]}"


@pytest.mark.slow
def test_a_run_outlives_a_raise_a_kill_and_a_full_disk(tmp_path: Path, wanted: list[float]) -> None:
    traps = plan((5, 1, "raise"), (11, 0, "kill"), (14, 1, "full"))
    with job(tmp_path, "training.steps=24", "pipeline.timeout=20", traps) as run:
        processes = run.until(run.ranks)
        assert run.wait() == 0, run.log
        assert run.losses == wanted
        incidents = run.incidents
        assert [incident["rank"] for incident in incidents] == [1, 0, 1], run.log
        causes = [incident["cause"] for incident in incidents]
        assert "ValueError: the trap was sprung" in causes[0]
        assert "rank 0 was killed by SIGKILL" in causes[1]
        assert "could not be saved" in causes[2]
        assert "File too large" in causes[2]
        from_step = [int(Path(incident["checkpoint"]).name[-8:]) for incident in incidents]
        assert all(step <= most for step, most in zip(from_step, (4, 10, 14), strict=True))  # a save may be under way
        for line in (*causes, "restart 1 of 3", f"resuming from step {from_step[0]}"):
            assert line in run.log
        assert "Traceback" not in run.log
        assert_whole(run.output)
        assert gone(processes)


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_the_run_goes_on(tmp_path: Path, wanted: list[float]) -> None:
    with job(tmp_path, "training.steps=24", "checkpoint.every=0", plan()) as run:
        run.until(lambda: run.steps() >= 3)
        processes = run.descendants()
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.log
        stopped = run.steps()
        assert stopped < 24, "it was too fast to be stopped"
        assert f"stopped: step {stopped}" in run.log
        assert "--resume" in run.log
        assert_whole(run.output)
        assert gone(processes)
    with job(tmp_path, "training.steps=24", "checkpoint.every=0", plan(), "--resume") as run:
        assert run.wait() == 0, run.log
        assert f"resuming from step {stopped}" in run.log
        assert run.losses == wanted


@pytest.mark.parametrize(
    ("number", "everywhere"),
    mostly_exhaustive([("TERM", False), ("HUP", False), ("TERM", True)], ("TERM", True)),
)
def test_a_signal_to_all_processes_of_a_run_saves_as_one_to_the_launcher(
    tmp_path: Path, number: str, everywhere: bool
) -> None:
    """`timeout` and terminals signal the group, some batch systems every process. The fork server ended by it, and
    ranks end with that; and `timeout`, which sends it twice, had asked to leave at once."""
    wanted = signal.Signals[f"SIG{number}"]
    with job(tmp_path, "training.steps=100000", "checkpoint.every=0", plan(), group=True) as run:
        run.until(lambda: run.steps() >= 3)
        processes = run.descendants()
        os.kill(run.process.pid, wanted)
        os.killpg(run.process.pid, wanted)
        for pid in run.ranks() if everywhere else ():
            os.kill(pid, wanted)
        assert run.wait() == 130, run.log
        assert f"stopped: step {run.steps()}" in run.log
        assert_whole(run.output)
        assert gone(processes)


@pytest.mark.exhaustive
def test_twice_leaves_at_once_and_a_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    with job(tmp_path, "training.steps=100000", plan((5, 1, "stall"))) as run:
        run.until(lambda: run.steps() >= 4 and checkpoints_in(run.output / "checkpoints"))
        processes = run.descendants()
        run.process.send_signal(signal.SIGINT)
        time.sleep(2 * ECHO_SECONDS)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 130, run.log
        assert gone(processes)
        assert_whole(run.output)
    with job(tmp_path, "training.steps=100000", plan(), "--resume") as run:
        run.until(lambda: "going on" in run.log)
        processes = run.descendants()
        assert len(processes) >= 3
        os.kill(run.ranks()[1], signal.SIGSTOP)  # a process that could not end by itself
        run.process.kill()
        assert gone(processes)
        assert_whole(run.output)


@pytest.mark.slow
def test_a_run_listens_on_loopback_only_and_its_ranks_end_with_the_launcher(tmp_path: Path) -> None:
    """Ranks went on for up to 26 steps: they ended with the fork server, which ended when it got around to it."""
    with job(tmp_path, "training.steps=100000", plan(), new=True) as run:
        run.until(lambda: run.steps() > 2 and bool(checkpoints_in(run.output / "checkpoints")))
        processes = run.descendants()
        addresses = {address for pid in (run.process.pid, *processes) for address in listening(pid)}
        assert addresses == {"0100007F"}, addresses  # 127.0.0.1, as the kernel writes it
        ranks = run.ranks()
        found = state_of(ranks[0])
        assert found is not None
        server = found[1]
        os.kill(server, signal.SIGSTOP)  # it never gets around to it
        os.kill(ranks[1], signal.SIGSTOP)  # nor does this one see that the launcher is gone
        run.process.kill()
        assert gone([server, *ranks], limit=1)
        assert gone(processes)
        assert_whole(run.output)


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [
        row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    ]
    return {row[1].rsplit(":", 1)[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.exhaustive
def test_a_stall_an_exit_and_too_many_failures(tmp_path: Path, wanted: list[float]) -> None:
    with job(tmp_path, "training.steps=24", "pipeline.timeout=4", plan((7, 1, "stall"), (13, 0, "exit"))) as run:
        assert run.wait() == 0, run.log
        assert run.losses == wanted
        stalled, left = run.incidents
        assert stalled["rank"] == 1
        assert "silent for 4 s" in stalled["cause"]
        assert left["rank"] == 0
    (tmp_path / "again").mkdir()
    settings = ["training.steps=24", "launch.max_restarts=1", plan((3, 1, "raise"), (5, 0, "raise"))]
    with job(tmp_path / "again", *settings) as run:
        assert run.wait() == 1, run.log
        assert [incident["rank"] for incident in run.incidents] == [1, 0]
        assert "restart 1 of 1" in run.log
        assert "restart 2" not in run.log
        assert_whole(run.output)


@pytest.mark.exhaustive  # tests/hosts/test_elastic_run.py has two agents and a lost rank, too
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_under_torchrun_as_on_two_hosts_a_killed_rank_changes_nothing(
    tmp_path: Path, wanted: list[float], rendezvous: str
) -> None:
    """Two agents, as two hosts have, with one rank each; they find each other by one of torchrun's own ways."""
    prepare(tmp_path)
    place = f"localhost:{free_port()}"
    meet = [f"--rdzv-backend={rendezvous}", f"--rdzv-endpoint={place}", "--rdzv-id=two"]
    module = ["--max-restarts=2", *meet, "-m", "penstock", "train"]
    settings = [*TINY, "output=run", "training.steps=24", plan((11, 1, "kill"))]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    agents = []
    for host in range(2):
        with (tmp_path / f"host{host}.txt").open("wb") as log:
            whole = [*command, f"--node-rank={host}", *module, *settings]
            agents.append(subprocess.Popen(whole, cwd=tmp_path, stdout=log, stderr=log))
    try:
        codes = [agent.wait(200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    said = "\n".join((tmp_path / f"host{host}.txt").read_text() for host in range(2))
    assert codes == [0, 0], said
    assert "resuming from step" in said
    assert "exitcode: -9" in said  # rank 0 says that rank 1 failed, unless torchrun's agent ends it first
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["loss"] for line in lines] == wanted


@pytest.mark.slow
def test_what_a_restart_cannot_mend_ends_the_run(tmp_path: Path) -> None:
    with job(tmp_path, "model.source=traps:nothing") as run:
        assert run.wait() == 2
        assert "model.source: traps has no nothing" in run.log
        assert "restart 1" not in run.log


@pytest.mark.parametrize(("kills", "replicas"), mostly_exhaustive(itertools.product((3, 50), (1, 2)), (3, 2)))
@pytest.mark.timeout(1500)
def test_kills_at_random_moments_change_nothing(kills: int, replicas: int, tmp_path: Path) -> None:
    """One job, killed again and again: while it starts, loads, trains and, every third time, while it saves."""
    chance = random.Random(8)
    killed = []
    count = 2 * replicas
    settings = ["training.steps=1000000", f"launch.max_restarts={kills + 5}", "checkpoint.every=1", plan()]
    settings.append(f"mesh.replicas={replicas}")
    with job(tmp_path, *settings) as run:
        for number in range(kills):
            ranks = run.until(lambda: found if len(found := run.ranks()) == count else None)
            if number % 3 == 0:
                run.until(lambda: saving(run), pause=0.002)
                time.sleep(chance.uniform(0, 0.02))
            else:
                time.sleep(chance.uniform(0, 1.2))
            victim = chance.randrange(count)
            os.kill(ranks[victim], signal.SIGKILL)
            killed.append(victim)
            run.until(lambda count=number: len(run.incidents) > count)
        done = run.steps()
        run.until(lambda: run.steps() > done)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.log
        assert [incident["rank"] for incident in run.incidents] == killed, run.log
        assert_whole(run.output)
        (tmp_path / "undisturbed").mkdir()
        assert run.losses == undisturbed(tmp_path / "undisturbed", run.steps(), replicas)


def saving(run: Job) -> bool:
    return any(path.name.startswith(".step-") for path in (run.output / "checkpoints").glob(".*"))
