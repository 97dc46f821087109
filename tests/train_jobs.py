"""`penstock train` as a process of its own: watched from outside, disturbed, and looked at after.

It is a fork of one that has torch loaded, and so is the server of its ranks (warm.py); a `new` one is as a user starts
it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import on_processes, state_of
from warm import WarmProcess

from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.run.metrics import read_metrics

# Traps for ranks: at pass `number` of an attempt, on one rank. The next attempt does not meet them again.
TRAPS = """
import os, resource, signal, time
import torch

def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # the next checkpoint does not fit: as on a full disk

def boom():
    raise ValueError("the trap was sprung")

SPRINGS = {
    "raise": boom,
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stall": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "full": limit,
}

class Rows:
    def __init__(self, plan=()):
        self.plan = {(attempt, number, rank): kind for attempt, (number, rank, kind) in enumerate(plan)}

    def batch(self, number):
        here = (int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), number, int(os.environ.get("RANK", 0)))
        if here in self.plan:
            SPRINGS[self.plan[here]]()
        generator = torch.Generator().manual_seed(number)
        rows = torch.randint(0, 64, (8, 13), generator=generator)
        return rows[:, :-1], rows[:, 1:]
"""

TINY = [
    "model.options.layers=2",
    "model.options.width=16",
    "model.options.heads=2",
    "model.options.dropout=0.1",
    "data.source=traps:Rows",
    "data.sequence=12",
    "data.batch=8",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "optimizer.warmup=2",
    "optimizer.decay=constant",
    "evaluation.every=0",
    "checkpoint.every=2",
    "logging.every=5",
    "logging.tensorboard=off",
]


def prepare(folder: Path) -> None:
    """Put the traps' module where the job looks for it."""
    (folder / "traps.py").write_text(TRAPS)


class Job:
    """A running `penstock train`."""

    def __init__(self, folder: Path, *settings: str, group: bool = False, new: bool = False) -> None:
        self.folder = folder
        self.output = folder / "run"
        self._log = (folder / "log.txt").open("wb")
        arguments = ["train", *TINY, "output=run", *settings]
        self.process = self._new(arguments, group) if new else self._warm(arguments, group)

    def _warm(self, arguments: list[str], group: bool) -> WarmProcess:
        return WarmProcess(["penstock", *arguments], self.folder, self._log, group)

    def _new(self, arguments: list[str], group: bool) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=self.folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            process_group=0 if group else None,
        )

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def incidents(self) -> list[dict[str, Any]]:
        path = self.output / "incidents.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        lines = read_metrics(self.output / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    def steps(self) -> int:
        """The last step that is written down."""
        return max((line["step"] for line in read_metrics(self.output / "metrics.jsonl")), default=0)

    def wait(self, limit: float = 200) -> int:
        return self.process.wait(limit)

    def until(self, ready: Callable[[], Any], limit: float = 150, pause: float = 0.02) -> Any:
        """Wait for something while the job runs; what lasts for a moment only needs a shorter `pause`."""
        deadline = time.monotonic() + limit
        while not (found := ready()):
            assert self.process.poll() is None, f"the job ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"waited for {limit} s:\n{self.log}"
            time.sleep(pause)
        return found

    def descendants(self) -> list[int]:
        """Every living process that the job has started, and their children."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (parent := _parent(int(entry.name))) is not None:
                children.setdefault(parent, []).append(int(entry.name))
        found, todo = [], [self.process.pid]
        while todo:
            inner = sorted(children.get(todo.pop(), []))
            found += inner
            todo += inner
        return found

    def ranks(self) -> list[int]:
        """The ranks' processes, by rank: children of the fork server, started in order."""
        return sorted(pid for pid in self.descendants() if _parent(pid) not in (None, self.process.pid))

    def close(self) -> None:
        self._log.close()
        for pid in [*self.descendants(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def _parent(pid: int) -> int | None:
    """Of a process that lives; None of one that is gone or only waits to be buried."""
    found = state_of(pid)
    return None if found is None or found[0] in "ZX" else found[1]


def gone(pids: list[int], limit: float = 10) -> bool:
    """Are all these processes gone, or will be within `limit` seconds?"""
    deadline = time.monotonic() + limit
    while any(_parent(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def job(folder: Path, *settings: str, group: bool = False, new: bool = False) -> Iterator[Job]:
    prepare(folder)
    running = Job(folder, *settings, group=group, new=new)
    try:
        yield running
    finally:
        running.close()


def undisturbed(folder: Path, steps: int, replicas: int = 1) -> list[float]:
    """The losses of the same training on processes that nobody touches."""
    prepare(folder)
    on_processes(2 * replicas, train_in, str(folder), steps, replicas)
    return [line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl")]


def train_in(folder: str, steps: int, replicas: int) -> None:
    import torch.distributed as dist

    from penstock.tools.train.config.read import load_config
    from penstock.tools.train.launch.stopping import Stop
    from penstock.tools.train.run.run_folder import RunFolder
    from penstock.tools.train.worker import Job as Told
    from penstock.tools.train.worker import train_here

    os.chdir(folder)
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    settings = ["output=run", f"training.steps={steps}", "checkpoint.every=0", f"mesh.replicas={replicas}"]
    config = load_config(None, [*TINY, *settings])
    if dist.get_rank() == 0:
        RunFolder(Path(config.output)).prepare(config, resume=False, fresh=False)
    dist.barrier()
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        assert train_here(Told(config, ""), Stop()) == 0


class StopAt(Stop):
    """Asked to stop in a step, on every rank alike."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    @property
    def asked(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left <= 0

    @asked.setter
    def asked(self, value: bool) -> None:
        pass
