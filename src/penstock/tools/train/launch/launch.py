"""Ranks as local processes, through torch's elastic agent: started, watched, named when they fail, started again.

The agent starts one process a rank and starts all again when one fails, up to `launch.max_restarts` times. What is
added here is what a person wants to know then: who failed and why, and from which checkpoint it goes on. Processes
are forked from a server that has torch loaded, so that a restart takes a second and not ten.

No process outlives the launcher, however that ends, and nothing listens but on the loopback address.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from penstock.reading import open_plain
from penstock.tools.train.config.consistent import processes_of
from penstock.tools.train.config.elastic import describe_layouts, elastic_layouts
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import NOT_HERE
from penstock.tools.train.launch.attempts import LOOPBACK, LocalRendezvous
from penstock.tools.train.launch.environment import Job, enter, kill_fork_server
from penstock.tools.train.launch.rank_notes import note_path, read_note, ready_path
from penstock.tools.train.launch.stopping import INTERRUPTED, asking, is_echo
from penstock.tools.train.run.run_folder import RunFolder

# Without it, torchrun's agents keep the address of a store that has moved.
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SETTLE = 4.0  # seconds that ranks have to report what they know of a failure, before they are ended
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
SHOW_CURSOR = "\x1b[?25h"
CHATTY = ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher")
Notify = Callable[[str], None]


class _AtOnce(BaseException):
    """Ctrl-C for the second time."""


class Agent(LocalElasticAgent):
    """torch's agent, which also reports who failed and why."""

    def __init__(self, spec: WorkerSpec, folder: RunFolder, notify: Notify, **options: Any) -> None:
        super().__init__(spec, **options)
        self._folder, self._notify = folder, notify
        self.stopping = False
        self.reason = ""  # why the last attempt failed
        self.usage = False  # Whether the user asked for something that cannot work.

    @property
    def _attempt(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    @property
    def ready(self) -> bool:
        """Can all ranks be asked to stop? A signal that comes earlier would only break their start."""
        ranks = range(self._worker_group.spec.local_world_size)
        return all(ready_path(self._folder, self._attempt, rank).exists() for rank in ranks)

    def signal_ranks(self, number: int) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._settled()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._explain(codes)
        return result

    def _settled(self) -> dict[int, int]:
        """Wait, once a rank has failed, until all have reported what they know; end those that do not come back.

        Returns exit codes as the ranks chose them, before any was ended from here.
        """
        context = getattr(self._pcontext, "_pc", None)
        if context is None:
            return {}
        processes = dict(enumerate(context.processes))
        if not any(process.exitcode for process in processes.values()):
            return {}
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and any(process.exitcode is None for process in processes.values()):
            time.sleep(0.02)
        codes = {rank: process.exitcode for rank, process in processes.items() if process.exitcode is not None}
        for process in processes.values():
            if process.exitcode is None:
                process.kill()  # stopped or stuck; a milder signal would not reach it
                process.join(SETTLE)
        return codes

    def _explain(self, codes: dict[int, int]) -> None:
        """Name the culprit, and decide whether it is worth another attempt."""
        spec, attempt = self._worker_group.spec, self._attempt
        notes = [read_note(note_path(self._folder, attempt, rank)) for rank in range(spec.local_world_size)]
        incident = _culprit(codes, [note for note in notes if note is not None])
        self.reason, self.usage = incident["cause"], incident.pop("usage", False)
        final = incident.pop("final") or self.stopping
        newest = _newest(self._folder)
        incident |= {"attempt": attempt, "time": time.time(), "checkpoint": newest}
        with suppress(OSError), open(open_plain(self._folder.incidents, APPEND), "a", encoding="utf-8") as file:
            file.write(json.dumps(incident) + "\n")
        if final:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            where = f"from {newest}" if newest else "from the beginning: there is no checkpoint yet"
            self._notify(f"{self.reason}\nrestart {attempt + 1} of {spec.max_restarts}, {where}")


def _newest(folder: RunFolder) -> str | None:
    from penstock.checkpoint.disk.manifest import find_newest  # This is slow to load, and few runs fail.

    latest, _ = find_newest(folder.checkpoints)  # The ranks report why others were passed over.
    return None if latest is None else str(latest)


def _culprit(codes: dict[int, int], notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose the best that is known: a signal that ended a rank, its own error, or what its peers report of it."""
    final = next((note for note in notes if note["final"]), None)
    if final is not None:
        return {"rank": final["culprit"], "cause": final["cause"], "final": True, "usage": final["usage"]}
    killed = sorted((rank, code) for rank, code in codes.items() if code < 0)
    if killed:
        rank, code = killed[0]
        with suppress(ValueError):
            where = _place(next((note for note in notes if note["culprit"] == rank), {}))
            name = signal.Signals(-code).name
            return {"rank": rank, "cause": f"rank {rank} was killed by {name}{where}", "final": False}
    own = [note for note in notes if note["culprit"] == note["rank"]]
    for note in own or notes:
        rank = note["culprit"]
        return {"rank": rank, "cause": f"rank {rank} failed{_place(note)}: {note['cause']}", "final": False}
    ended = ", ".join(f"rank {rank} with exit code {code}" for rank, code in sorted(codes.items()) if code)
    return {"rank": None, "cause": f"ended without a word: {ended or 'no rank is known'}", "final": False}


def _place(note: dict[str, Any]) -> str:
    named = [f"{name} {note[name]}" for name in ("stage", "action", "microbatch") if note.get(name) is not None]
    return f" ({', '.join(named)})" if named else ""


def launch(job: Job, notify: Notify) -> int:
    """Train on local processes; the exit code of the command."""
    config = job.config
    folder = RunFolder(Path(config.output))
    for old in folder.logs.glob("ready-*"):  # A run before this one left them.
        old.unlink()
    for name in CHATTY:  # What they report is reported better here.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="rank",
        local_world_size=processes_of(config),
        entrypoint=enter,
        args=(replace(job, launcher=os.getpid()),),
        rdzv_handler=LocalRendezvous(uuid.uuid4().hex[:8]),
        max_restarts=config.launch.max_restarts,
        monitor_interval=0.05,
        local_addr=LOOPBACK,
    )
    redirects = dict.fromkeys(range(1, processes_of(config)), Std.ALL)
    tee = {rank: Std.ALL for rank in config.logging.ranks if rank}
    logs = DefaultLogsSpecs(log_dir=str(folder.logs), redirects=redirects, tee=tee)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    limits = {"exit_barrier_timeout": 10, "shutdown_timeout": 10}
    lines = {"logs_specs": logs, "log_line_prefix_template": "[rank ${rank}] "}
    agent = Agent(spec, folder, notify, start_method="forkserver", **lines, **limits)
    with _interrupts(agent, notify):
        return _run(agent, folder, notify)


def _run(agent: Agent, folder: RunFolder, notify: Notify) -> int:
    try:
        result = agent.run()
    except _AtOnce:
        notify("left at once; what was saved before is whole")
        return INTERRUPTED
    finally:
        agent._worker_group.spec.rdzv_handler.shutdown()
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # a rank that was killed while it drew its line left it hidden
            sys.stdout.flush()
    if result.is_failed():
        if agent.stopping and not agent.reason:
            return INTERRUPTED
        notify(f"{agent.reason}\nwhat each rank wrote is in {folder.logs}")
        return 2 if agent.usage else 1
    return max((int(code) for code in result.return_values.values()), default=0)


@contextmanager
def _interrupts(agent: Agent, notify: Notify) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGHUP: once, ranks finish the step and save; twice, everything ends."""
    since = float("-inf")

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if is_echo(since):
            return
        since = monotonic()
        if agent.stopping or not agent.ready:
            for each in before:  # Another signal must not cut the end short.
                signal.signal(each, signal.SIG_IGN)
            kill_fork_server()
            raise _AtOnce
        agent.stopping = True
        notify("finishing the step, then saving; once more to leave at once")
        agent.signal_ranks(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *asking())}
    try:
        for number in before:
            signal.signal(number, on_signal)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


def torchrun_command(config: TrainConfig, arguments: list[str]) -> str:
    """Describe how the same run starts on several hosts.

    Static where that is possible: torchrun's c10d rendezvous, which elastic runs need, unpickles what anybody sends it.
    """
    ranks = processes_of(config)
    hosts = 2 if ranks % 2 == 0 else ranks
    each = ranks // hosts
    fewest = hosts
    if config.launch.elastic:
        fewest = min(count // each for count in elastic_layouts(config) if count % each == 0)
    nodes, meeting = f"{hosts}", ["--node-rank=NUMBER", "--master-addr=FIRST_HOST", "--master-port=29400"]
    if fewest < hosts:
        nodes = f"{fewest}:{hosts}"
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_HOST:29400", "--rdzv-id=RUN"]
    sizes = [f"--nnodes={nodes}", f"--nproc-per-node={each}", f"--max-restarts={config.launch.max_restarts}"]
    parts = ["torchrun", *sizes, *meeting, "-m", "penstock", "train", *arguments]
    command = f"{NOT_HERE[0]}=1 {shlex.join(parts)}"  # python -m would search the working folder
    if fewest == hosts:
        return f"on several hosts, on each with its NUMBER from 0: {command}"
    return f"on several hosts, on each: {FRESH_STORE}=1 {command}\nelastic: {describe_layouts(config)} processes"
