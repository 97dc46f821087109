"""Run a function on real gloo processes: `on_processes(4, function, *arguments)` returns what each rank returned.

The function stands at the top of a test file or of a helper; a process loads that file by its path. Processes are
forked from a server that has torch loaded, so that a group costs about a second. An error on any rank is raised here,
with that rank's traceback; a rank that says nothing in time is an error as well, and no process outlives the call.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

SECRET = "of the tests, and of no worth"  # without one, what only a pickle holds would not travel by gloo
LIMIT = 100.0  # seconds for all that one call runs
# An optimizer and a sharded module load torch's compiler, and test files load pytest: a second of work for every rank.
LOADED = ["torch", "penstock.pipeline", "penstock.parallel.compose", "torch._dynamo", "torch.distributed.checkpoint"]
LOADED += ["pytest", "hypothesis"]


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


def on_processes(ranks: int, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes of one gloo group; the values by rank."""
    context = forking()
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (theirs, rank, ranks, f"file://{folder}/rendezvous", function.__code__.co_filename)
            process = context.Process(target=_enter, args=(*job, function.__name__, _packed(arguments)))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collected(pipes, limit)
        finally:
            for process in processes:
                process.join(2.0)
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def forking() -> ForkServerContext:
    """Where ranks are forked from; one list for all, because the server that is started first serves all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def state_of(pid: int) -> tuple[str, int] | None:
    """A process's state, as one letter, and its parent; None of one that is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)


def is_stopped(pid: int) -> bool:
    state = state_of(pid)
    return state is not None and state[0] == "T"


def _collected(pipes: list[Connection], limit: float) -> list[Any]:
    answers: dict[int, tuple[bool, Any]] = {}
    silent = dict(enumerate(pipes))
    deadline = time.monotonic() + limit
    while silent and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(silent.values()), left):
            rank = next(rank for rank, other in silent.items() if other is pipe)
            del silent[rank]
            try:
                answers[rank] = _unpacked(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                answers[rank] = (False, "died without a word")
        if any(not good for good, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + 10)  # the others say what they know, or never will
    answers.update(dict.fromkeys(silent, (False, f"said nothing for {limit:g} s")))
    problems = [f"--- rank {rank}: {what}" for rank, (good, what) in sorted(answers.items()) if not good]
    if problems:
        raise RankError("\n".join(problems))
    return [answers[rank][1] for rank in range(len(pipes))]


def _enter(pipe: Connection, rank: int, ranks: int, place: str, file: str, name: str, content: bytes) -> None:
    """What a process runs."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("PENSTOCK_SECRET", SECRET)
    try:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        answer = (True, _loaded(file, name)(*_unpacked(content)))
        dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(_packed(answer))
    pipe.close()


def _loaded(file: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location(f"on_process_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def _packed(value: Any) -> bytes:
    """torch.save and not pickle: tensors must not travel through shared memory, which ends with its process."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)
