"""Commands that run in forks of one process, which has torch and penstock loaded.

    subprocess.run(["bash", "-c", "penstock show 1f1b | head"], env={**os.environ, "PATH": f"{warm_commands()}:..."})

`warm_commands()` is a folder of `penstock`, `python` and `torchrun`. Each hands its arguments, its folder, its
environment and its open files to a server, which forks, and ends as the fork does. A new Python would load torch for
every command: seconds of work that no document is about. The installed command itself runs in tests/bench, and
torchrun in tests/parallel/test_two_hosts.py and tests/faults/test_training.py.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import socket
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

LOADED = ["penstock.pipeline", "penstock.parallel.compose", "penstock.train.launch.launch", "penstock.cli"]
LOADED += ["torch._dynamo", "torch.distributed.checkpoint"]
LARGEST = 1 << 20  # bytes of a command line and its environment
COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    code = int(server.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


@cache
def warm_commands() -> Path:
    """The folder of the commands; their server ends with this process."""
    temporary = tempfile.TemporaryDirectory(prefix="penstock-warm-")
    folder = Path(temporary.name)
    address = str(folder / "socket")
    for name in ("penstock", "python", "torchrun"):
        (folder / name).write_text(COMMAND.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    server = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(temporary.cleanup)
    atexit.register(server.communicate)  # closes its input, and waits
    return folder


def serve(address: str) -> None:
    """Fork for every command that comes, until standard input ends."""
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [], 1.0)[0]):
            if ready:
                connection = listening.accept()[0]
                if not os.fork():
                    listening.close()
                    answer(connection)
                    os._exit(0)
                connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def answer(connection: socket.socket) -> None:
    """Fork once more, for the command, and send what that ended with."""
    message, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
    command = multiprocessing.get_context("fork").Process(target=become, args=(files, *json.loads(message)))
    command.start()
    for file in files:
        os.close(file)
    command.join()
    connection.send(str(command.exitcode).encode())


def become(files: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run what a command line says, as a new process would."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
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
        del sys.argv[0]
        if sys.argv[0] == "-W":
            warnings.simplefilter(sys.argv[1])  # type: ignore[arg-type]
            del sys.argv[:2]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
