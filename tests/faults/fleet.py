"""Processes that may die: a function on each rank of a gloo group, what each said before its end, and how it ended.

Unlike `processes`, which raises what went wrong, nothing that happens to a rank is an error here. A rank says things
by `say(value)`; times that ranks tell are comparable, because all read the one monotonic clock of this machine.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from processes import _loaded, _packed, _unpacked, forking, free_port, is_stopped


@dataclass
class Ending:
    """What a rank said, in order; `code` is its exit code, None where it never ended by itself."""

    said: list[Any] = field(default_factory=list)
    code: int | None = None
    error: str = ""  # what it wrote to stderr


def launch(
    ranks: int, function: Callable[..., Any], *arguments: Any, tcp: bool = False, limit: float = 60
) -> list[Ending]:
    """`function(say, *arguments)` on each rank. With `tcp`, rank 0 hosts the store, as without a launcher's agent."""
    context = forking()
    endings = [Ending() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        place = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{folder}/rendezvous"
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (theirs, rank, ranks, place, f"{folder}/{rank}", function.__code__.co_filename, function.__name__)
            process = context.Process(target=_enter, args=(*job, _packed(arguments)))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            _listen(pipes, processes, endings, time.monotonic() + limit)
        finally:
            for ending, process in zip(endings, processes, strict=True):
                process.join(0)
                ending.code = process.exitcode
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()
        for rank, ending in enumerate(endings):
            log = Path(f"{folder}/{rank}")
            ending.error = log.read_text() if log.exists() else ""
    return endings


def _listen(pipes: list[Connection], processes: list[Any], endings: list[Ending], deadline: float) -> None:
    """Until all have ended, but for those that are stopped: these are given up when the others are done."""
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), 0.1):
            assert isinstance(pipe, Connection)
            try:
                endings[open_pipes[pipe]].said.append(_unpacked(pipe.recv_bytes()))
            except (EOFError, OSError):
                del open_pipes[pipe]
        if open_pipes and all(is_stopped(processes[rank].pid) for rank in open_pipes.values()):
            break
    for rank, process in enumerate(processes):
        if rank not in open_pipes.values():
            process.join(max(0.0, min(10.0, deadline - time.monotonic())))  # its pipe is closed: this is its exit


def _enter(pipe: Connection, rank: int, ranks: int, place: str, log: str, file: str, name: str, content: bytes) -> None:
    """What a process runs. Errors are left to end it."""
    import torch
    import torch.distributed as dist

    with open(log, "wb") as written:
        os.dup2(written.fileno(), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    _loaded(file, name)(lambda value: pipe.send_bytes(_packed(value)), *_unpacked(content))


def die(say: Callable[[Any], None], how: int) -> Callable[[], None]:
    """A trap's spring that tells the time and sends this process a signal."""

    def spring() -> None:
        say(("fault", time.monotonic()))
        os.kill(os.getpid(), how)

    return spring


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
__all__ = ["KILL", "STOP", "Ending", "die", "launch"]
