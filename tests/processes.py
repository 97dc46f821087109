"""Run functions on real gloo processes: the one harness of all tests that need some.

    on_processes(4, function, *arguments)   what each rank returned; an error on any rank is raised here
    on_processes(4, function, loading=["big"])   the same, by ranks that have a slow module loaded when they begin
    launch(4, function, *arguments)         ranks that may die: what each said before its end, and how it ended

The function stands at the top of a test file or of a helper; a process loads that file by its path. Processes are
forked from a server that has torch loaded, so that a group costs about a second. A rank that says nothing in time is
given up, and no process outlives the call.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECRET = "of the tests, and of no worth"  # without one, what only a pickle holds would not travel by gloo
LIMIT = 400.0  # seconds for all that one call runs
LAST_WORDS = 10.0  # for the others, once a rank has failed
# An optimizer and a sharded module load torch's compiler, and test files load pytest: a second of work for every rank.
LOADED = ["torch", "penstock.pipeline", "penstock.parallel.compose", "torch._dynamo", "torch.distributed.checkpoint"]
LOADED += ["pytest", "hypothesis"]
HERE: list[str] = []  # how ranks start, in a process that has loaded more for them


class RankError(AssertionError):
    """What went wrong on the ranks, with their tracebacks."""


@dataclass
class Ending:
    """What a rank said, in order; `code` is its exit code, None where it never ended by itself."""

    said: list[Any] = field(default_factory=list)
    code: int | None = None
    error: str = ""  # what it wrote to stderr


def on_processes(
    ranks: int, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT, loading: Sequence[str] = ()
) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes of one gloo group; the values by rank.

    Modules of `loading` are loaded once, by a process that the ranks are forked from.
    """
    job = (function.__code__.co_filename, function.__name__, arguments)
    if loading:
        return _from_one_that_loads(loading, ranks, job, limit)
    return _answers(ranks, job, limit)


def _from_one_that_loads(loading: Sequence[str], ranks: int, job: tuple[Any, ...], limit: float) -> list[Any]:
    context = forking()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_load_and_fork, args=(theirs, list(loading), ranks, packed(job), limit))
    process.start()
    theirs.close()
    try:
        good, value = unpacked(ours.recv_bytes())  # ends with the process, and that at the limit
    except EOFError:
        good, value = False, "the process that ranks are forked from died"
    finally:
        process.join()
        process.close()
        ours.close()
    if not good:
        raise RankError(value)
    return list(value)


def _load_and_fork(pipe: Connection, loading: list[str], ranks: int, job: bytes, limit: float) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    for name in loading:
        importlib.import_module(name)
    HERE.append("fork")
    try:
        answer = (True, _answers(ranks, unpacked(job), limit))
    except RankError as error:
        answer = (False, str(error))
    pipe.send_bytes(packed(answer))


def _answers(ranks: int, job: tuple[Any, ...], limit: float) -> list[Any]:
    endings = launch(ranks, _answer, *job, limit=limit, is_failure=lambda answer: not answer[0])
    answers = [each.said[0] if each.said else (False, f"died or hung, {each.code}\n{each.error}") for each in endings]
    problems = [f"--- rank {rank}: {what}" for rank, (good, what) in enumerate(answers) if not good]
    if problems:
        raise RankError("\n".join(problems))
    return [value for _, value in answers]


def _answer(say: Callable[[Any], None], file: str, name: str, arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    os.environ.setdefault("PENSTOCK_SECRET", SECRET)
    try:
        value = loaded(file, name)(*arguments)
        dist.destroy_process_group()
    except BaseException:
        say((False, traceback.format_exc()))
    else:
        say((True, value))


def launch(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    tcp: bool = False,
    limit: float = 60.0,
    is_failure: Callable[[Any], bool] = lambda said: False,
) -> list[Ending]:
    """`function(say, *arguments)` on each rank; nothing that happens to a rank is an error here.

    With `tcp`, rank 0 hosts the store, as without a launcher's agent. When a rank has said what `is_failure`, the
    others have some seconds left.
    """
    context = forking()
    endings = [Ending() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        place = f"tcp://127.0.0.1:{free_port()}" if tcp else f"file://{folder}/rendezvous"
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (theirs, rank, ranks, place, f"{folder}/{rank}", function.__code__.co_filename, function.__name__)
            process = context.Process(target=_enter, args=(*job, packed(arguments)))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            _listen(pipes, processes, endings, time.monotonic() + limit, is_failure)
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


def forking() -> Any:
    """Where ranks are forked from; one list for all, because the server that is started first serves all tests."""
    if HERE:
        return multiprocessing.get_context(HERE[0])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def share_server() -> None:
    """Fork the server of ranks from this process, with what it loads; workers that are forked later share it."""
    import warm

    for name in LOADED:
        importlib.import_module(name)
    forking()
    new, util.spawnv_passfds = util.spawnv_passfds, warm.forked  # type: ignore[attr-defined]
    sys.stdout.flush()
    shown = os.dup(1)  # Nothing captures here yet, and what ranks print is not for the report.
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        forkserver.ensure_running()
    os.dup2(shown, 1)
    os.close(shown)
    util.spawnv_passfds = new  # type: ignore[attr-defined]
    # A fork of this process cannot wait for the server, by which Python would see that it is running.
    forkserver.ensure_running = lambda: None
    forkserver._forkserver.ensure_running = forkserver.ensure_running  # type: ignore[attr-defined]


def _listen(
    pipes: list[Connection],
    processes: list[Any],
    endings: list[Ending],
    deadline: float,
    is_failure: Callable[[Any], bool],
) -> None:
    """Until all have ended, but for those that are stopped: these are given up when the others are done."""
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), 0.1):
            assert isinstance(pipe, Connection)
            try:
                said = unpacked(pipe.recv_bytes())
            except (EOFError, OSError):
                del open_pipes[pipe]
                continue
            endings[open_pipes[pipe]].said.append(said)
            if is_failure(said):
                deadline = min(deadline, time.monotonic() + LAST_WORDS)
        if open_pipes and all(is_stopped(processes[rank].pid) for rank in open_pipes.values()):
            break
    for rank, process in enumerate(processes):
        if rank not in open_pipes.values():
            process.join(max(0.0, min(10.0, deadline - time.monotonic())))  # its pipe is closed: this is its exit


def _enter(pipe: Connection, rank: int, ranks: int, place: str, log: str, file: str, name: str, content: bytes) -> None:
    """What a process runs. Errors are left to end it."""
    join_group(rank, ranks, place, log)
    loaded(file, name)(lambda value: pipe.send_bytes(packed(value)), *unpacked(content))
    pipe.close()


def join_group(rank: int, ranks: int, place: str, log: str) -> None:
    """Make this process a rank of a gloo group, whose errors are written to a file."""
    import torch
    import torch.distributed as dist

    with open(log, "wb") as written:
        os.dup2(written.fileno(), 2)
    torch.set_num_threads(1)
    gc.freeze()  # what the server has loaded stays: to look through it takes a quarter second each time, and copies it
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def loaded(file: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location(f"on_process_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


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


def packed(value: Any) -> bytes:
    """torch.save and not pickle: tensors must not travel through shared memory, which ends with its process."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)
