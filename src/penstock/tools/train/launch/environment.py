"""Where a launched rank begins: its job, the environment that torch reads, and the server that loads it for all."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.runtime.messages.secret import VARIABLE as SECRET
from penstock.runtime.messages.secret import has_secret
from penstock.tools.train.config.consistent import processes_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import libraries_of

LOOPBACK_INTERFACE = "lo"  # gloo's connections do not leave it.

WANTED = {
    # At the end of every operation threads wait for each other, by default in a loop that keeps the core. Where another
    # process has the core that the last of them needs, an operation of microseconds takes a time slice: measured on two
    # busy cores, a small step took 25 times the CPU and 15 times the time. Asleep, they cost what one thread costs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The memory of a run is counted from its first step on, and torch's allocator would warn of each older block.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def prepare_environment() -> None:
    """Set what the user has not set; to be called before torch is loaded, here or in the ranks."""
    for name, value in WANTED.items():
        os.environ.setdefault(name, value)


def start_fork_server(config: TrainConfig) -> None:
    """Start the server that ranks are forked from, before this process loads torch: the two then load it at once.

    Ranks have the server's environment, so what they must find there is set here.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes_of(config))))
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    if not has_secret():
        os.environ[SECRET] = secrets.token_hex(32)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["penstock.tools.train.launch.fork_server", "penstock.tools.train.worker", *libraries_of(config)]
    )
    multiprocessing.forkserver.ensure_running()


def kill_fork_server() -> None:
    """End the server, and with it every rank that was forked from it; they have ended when this returns.

    A rank that is just starting would else miss what the launcher takes away, and report that.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
            os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)  # Its children are then killed, too.


@dataclass(frozen=True)
class Job:
    """What a process is given; it travels to it pickled."""

    config: TrainConfig
    resume_command: str  # the command that goes on with this run
    resumed: bool = False  # there was such a run before
    launcher: int = 0  # the process that all ranks end with


def enter(job: Job) -> int:
    """Train as a launched rank; the exit code."""
    from penstock.tools.train.worker import train_launched  # takes as long to load as torch; in a rank it is loaded

    return train_launched(job)
