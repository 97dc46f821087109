"""Commands that run in forks of one process, which has torch and penstock loaded.

    subprocess.run(["bash", "-c", "penstock show 1f1b | head"], env={**os.environ, "PATH": f"{warm_commands()}:..."})
    WarmProcess(["penstock", "train"], cwd=folder, stdout=file)   the same as a process that can be signalled

`warm_commands()` is a folder of `penstock`, `python` and `torchrun`. Each hands its arguments, its folder, its
environment and its open files to a server, which forks, and ends as the fork does. A new Python would load torch for
every command: seconds of work that no document is about. So would the server that `penstock train` forks its ranks
from; here that is a fork, too. The installed command itself runs in tests/bench, torchrun in
tests/hosts/test_elastic_run.py, and `penstock train` with all its new processes in tests/faults/test_training.py.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import warnings
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import IO, Any

import servers

from penstock.tools.train.launch.environment import WANTED

LOADED = ["penstock.pipeline", "penstock.parallel.compose", "penstock.tools.train.launch.launch", "penstock.cli"]
LOADED += ["penstock.tools.train.worker", "torch._dynamo", "torch.distributed.checkpoint"]
LARGEST = 1 << 20  # bytes of a command line and its environment
COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([sys.argv, os.getcwd(), dict(os.environ), False]).encode()], [0, 1, 2])
    server.recv(16)  # the number of the process
    code = int(server.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


@cache
def warm_commands() -> Path:
    """The folder of the commands; their server ends with this process and its forks."""
    folder = _folder()
    if not (folder / "socket").exists():
        environment = {
            **os.environ,
            **WANTED,
        }  # torch reads it when it is loaded, and `penstock train` would set it before
        command = [sys.executable, __file__, str(folder / "socket")]
        subprocess.run(command, stdin=servers.life()[0], env=environment, check=True)
    return folder


def share_server() -> None:
    """Fork the server from this process; workers that are forked later share it."""
    before = dict(os.environ)
    os.environ.update(WANTED)
    serve(str(_folder() / "socket"), servers.life()[0])
    os.environ.clear()
    os.environ.update(before)
    warm_commands()


@cache
def _folder() -> Path:
    folder = servers.folder() / "warm"
    folder.mkdir()
    for name in ("penstock", "python", "torchrun"):
        (folder / name).write_text(COMMAND.format(python=sys.executable, address=str(folder / "socket")))
        (folder / name).chmod(0o755)
    return folder


class WarmProcess:
    """A command as `subprocess.Popen` runs it, in a fork: its own process, which is not this one's child."""

    def __init__(self, command: list[str], cwd: Path, stdout: IO[bytes], group: bool = False) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(str(warm_commands() / "socket"))
        job = [command, str(cwd), dict(os.environ), group]
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), stdout.fileno(), stdout.fileno()]
            socket.send_fds(self._server, [json.dumps(job).encode()], files)
        self.pid = int(self._server.recv(16))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """What it ended with, if it has."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, limit: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], limit)[0]:
                raise subprocess.TimeoutExpired("penstock", limit or 0.0)
            self.returncode = int(self._server.recv(16))
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(address: str, until: int) -> None:
    """Fork for every command that comes, until the writing ends of a pipe are closed; return when one may come."""
    for name in LOADED:
        importlib.import_module(name)
    servers.answer_all(address, socket.SOCK_SEQPACKET, until, answer)


def answer(connection: socket.socket) -> None:
    """Fork once more, for the command, and send the number of its process and what that ended with."""
    util.spawnv_passfds = forked  # type: ignore[attr-defined]
    message, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
    command = multiprocessing.get_context("fork").Process(target=become, args=(files, *json.loads(message)))
    command.start()
    connection.send(str(command.pid).encode())
    for file in files:
        os.close(file)
    command.join()
    connection.send(str(command.exitcode).encode())


def become(files: list[int], arguments: list[str], folder: str, environment: dict[str, str], group: bool) -> None:
    """Run what a command line says, as a new process would."""
    if group:
        os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)  # a fork of multiprocessing reads nothing
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, sys.argv = Path(arguments[0]).name, arguments
    if kind == "penstock":
        sys.path[0] = sysconfig.get_path("scripts")
        sys.argv[0] = f"{sys.path[0]}/penstock"
        sys.modules["penstock.cli"].main()
    elif kind == "torchrun":
        sys.exit(importlib.import_module("forked_torchrun").main())
    else:
        sys.executable = sys.argv.pop(0)  # a program that starts another Python gets a fork, too
        if sys.argv[0] == "-u":
            del sys.argv[0]
        if sys.argv[0] == "-W":
            warnings.simplefilter(sys.argv[1])  # type: ignore[arg-type]
            del sys.argv[:2]
        if sys.argv[0] == "-m":
            sys.path[0] = folder
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            return
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def forked(path: Any, arguments: list[str], files: list[int], new: Any = util.spawnv_passfds) -> int:  # type: ignore[attr-defined]
    """A fork server of a command, whose start is one line of Python: a fork runs it, and loads nothing again."""
    if "multiprocessing.forkserver" not in arguments[-1]:
        return int(new(path, arguments, files))
    child = os.fork()
    if not child:
        try:
            open_now = [int(name) for name in os.listdir("/proc/self/fd")]
            for file in set(open_now) - {0, 1, 2, *files}:
                with suppress(OSError):  # the one that listed them
                    os.close(file)
            exec(arguments[-1], {})
        finally:
            os._exit(1)
    return child


if __name__ == "__main__":
    serve(sys.argv[1], 0)
