"""The process that cases on the pretended device are forked from: `python server.py ADDRESS`.

Torch, the device and the library are loaded once, in the order that the device's name asks for. Every case gets a
process for each of its ranks, so that no case sees what another left on its device.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
LOADED = ["penstock.pipeline", "penstock.parallel.compose", "torch._dynamo", "torch.distributed.checkpoint", "pytest"]
LAST_WORDS = 20.0  # seconds for the other ranks once one has failed


def serve(address: str) -> None:
    """Answer at an address until those who may ask have gone; return when it can be connected to."""
    sys.path.insert(0, str(TESTS))
    importlib.import_module("accelerator.pretend")  # before torch
    for name in LOADED:
        importlib.import_module(name)
    importlib.import_module("servers").answer_all(address, socket.SOCK_STREAM, 0, _serve_one)


def _serve_one(connection: socket.socket) -> None:
    """Answer the jobs of one worker until it has gone."""
    with Connection(connection.detach()) as jobs, suppress(EOFError):
        while True:
            job = jobs.recv()
            jobs.send(_answers(jobs, **job))


def _answers(jobs: Connection, ranks: int, limit: float, **job: Any) -> list[dict[str, Any]]:
    """Fork the ranks of a case, and return what each answered, or how it ended."""
    with tempfile.TemporaryDirectory(prefix="pretend-") as folder:
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            pid = os.fork()
            if not pid:
                ours.close()
                jobs.close()
                _become(theirs, rank, ranks, folder, **job)
            theirs.close()
            pipes[ours] = rank
            processes.append(pid)
        answers: list[dict[str, Any]] = [{} for _ in range(ranks)]
        _listen(pipes, answers, limit)
        for rank, pid in enumerate(processes):
            answers[rank]["code"] = _end(pid, grace=0.0 if not answers[rank] else 2.0)
            log = Path(folder, str(rank))
            answers[rank]["stderr"] = log.read_text(errors="replace") if log.exists() else ""
    return answers


def _listen(pipes: dict[Connection, int], answers: list[dict[str, Any]], limit: float) -> None:
    due = time.monotonic() + limit
    while pipes and (left := due - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(pipes), left):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                answers[rank].update(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                answers[rank]["error"] = "the process died"
            if answers[rank].get("error"):
                due = min(due, time.monotonic() + LAST_WORDS)
            pipe.close()
    for pipe, rank in pipes.items():
        answers[rank]["error"] = "no answer in time"
        pipe.close()


def _end(pid: int, grace: float) -> int:
    """Return the exit code of a process, negative for a signal; stop it where it does not end."""
    due = time.monotonic() + grace
    while time.monotonic() < due:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(pipe: Connection, rank: int, ranks: int, folder: str, **job: Any) -> None:
    """Run a rank of a case and end."""
    answer: dict[str, Any]
    try:
        with open(Path(folder, str(rank)), "wb") as written:
            os.dup2(written.fileno(), 2)
        importlib.import_module("faulthandler").enable()
        answer = _run(rank, ranks, folder, **job)
    except BaseException:
        answer = {"error": traceback.format_exc()}
    pretend = sys.modules["accelerator.pretend"]
    answer["findings"] = {each: [(found.text, found.place) for found in getattr(pretend, each)()] for each in KINDS}
    answer["counts"] = dict(pretend.counts())
    answer["side_by_side"] = list(pretend.native.side_by_side())
    pipe.send_bytes(pickle.dumps(answer))
    sys.stderr.flush()
    os._exit(0)  # Kernels may still run or hang; no thread of the device is waited for.


KINDS = ("races", "syncs", "errors", "deadlocks")


def _run(
    rank: int,
    ranks: int,
    folder: str,
    function: str | tuple[str, str],
    arguments: bytes,
    grouped: bool,
    eager: bool,
    timeout: float,
    environment: dict[str, str],
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from processes import SECRET, loaded

    os.environ.update(environment)
    torch.set_num_threads(1)
    if grouped:
        os.environ.setdefault("PENSTOCK_SECRET", SECRET)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        torch.accelerator.set_device_index(rank)
        dist.init_process_group(
            f"cpu:gloo,{pretend.NAME}:pretendccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
            device_id=pretend.device(rank) if eager else None,
        )
    if isinstance(function, str):
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
    else:
        call = loaded(*function)
    value = call(*torch.load(io.BytesIO(arguments), weights_only=False))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return {"value": buffer.getvalue()}


if __name__ == "__main__":
    serve(sys.argv[1])
