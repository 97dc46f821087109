"""What the servers that tests fork processes from have in common: one of each kind serves all workers of a run.

They stand in one folder, and end when the process that collected the tests and all its workers have ended: each of
these holds the writing end of a pipe that the servers watch. `share` is called before workers are forked, and starts
those servers as forks, too: what they need is loaded by then.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import util
from pathlib import Path


@cache
def folder() -> Path:
    """Return a folder that is removed when the process that asked first ends, and not when its forks do."""
    return Path(util.get_temp_dir())


@cache
def life() -> tuple[int, int]:
    """Return a pipe, of which this process and its forks keep both ends open, and a server the reading one."""
    return os.pipe()


@contextmanager
def alone() -> Iterator[None]:
    """Keep the other workers of this run out."""
    with open(folder() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def share() -> None:
    """Start, as forks, the servers that nearly every run of all tests needs."""
    import processes
    import warm

    folder()
    life()
    with warnings.catch_warnings():
        warnings.resetwarnings()  # In ranks and commands a warning is no error, as it is in tests.
        warm.share_server()  # first, because its commands start servers of ranks of their own
        processes.share_server()


def answer_all(address: str, kind: socket.SocketKind, until: int, answer: Callable[[socket.socket], None]) -> None:
    """Listen at a path; fork for every connection, until the writing ends of a pipe are closed.

    This returns in the process that called, as soon as it can be connected to; a fork of it serves.
    """
    with socket.socket(socket.AF_UNIX, kind) as listening:
        listening.bind(address)
        listening.listen()
        if os.fork():
            return
        _forget_the_tests()
        try:
            while until not in (ready := select.select([listening, until], [], [], 1.0)[0]):
                if ready:
                    connection = listening.accept()[0]
                    if not os.fork():
                        listening.close()
                        answer(connection)
                        break
                    connection.close()
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
        finally:
            sys.stderr.flush()
            os._exit(0)


def _forget_the_tests() -> None:
    """Leave what is of the process that forked this server: its end of the pipe, and its output."""
    if life.cache_info().currsize:
        os.close(life()[1])
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    with open(os.devnull, "r+b", buffering=0) as nothing:
        os.dup2(nothing.fileno(), 1)
    gc.freeze()  # What is loaded stays: no fork need look through it, which would copy it.
