"""Run one scenario on every rank, on threads or on processes (gloo, shared memory), and hand back what each had to say.

A scenario is a function `scenario(transport, **options)` at the top of a test file. Processes are
forked from a server that has torch loaded, so a group of three costs about half a second, and
load the test file by its path.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import runpy
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deadlines import TIMEOUT
from processes import SECRET, forking, free_port, is_stopped

from penstock.errors import PeerFailure

LIMIT = 100.0  # seconds for a scenario, whatever happens


@dataclass
class Outcome:
    """How a rank ended: with a value, with an error, or without a word."""

    value: Any = None
    error: BaseException | None = None
    silent: bool = False
    exit_code: int | None = None

    def get(self) -> Any:
        assert not self.silent, f"this rank died or hung (exit code {self.exit_code})"
        if self.error is not None:
            raise self.error
        return self.value


def run(kind: str, scenario: Any, ranks: int = 2, timeout: float = TIMEOUT, **options: Any) -> list[Outcome]:
    """The outcomes by rank. `kind`: "threads", "threads-0" (nothing buffered), "gloo", "shared"; "-tcp": its store."""
    if kind.startswith("threads"):
        return _run_threads(scenario, ranks, timeout, 0 if kind.endswith("-0") else None, options)
    return _run_processes(kind, scenario, ranks, timeout, options)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks returned; raises the first error."""
    return [outcome.get() for outcome in outcomes]


def _run_threads(
    scenario: Any, ranks: int, timeout: float, capacity: int | None, options: dict[str, Any]
) -> list[Outcome]:
    from penstock.runtime.transport import ThreadTransport

    group = ThreadTransport.group(ranks, capacity=capacity, timeout=timeout)
    outcomes = [Outcome(silent=True) for _ in range(ranks)]

    def work(rank: int) -> None:
        try:
            outcomes[rank] = Outcome(value=scenario(group[rank], **options))
        except BaseException as error:
            outcomes[rank] = Outcome(error=error)
            group[rank].abort(PeerFailure(rank, f"the scenario failed: {error!r}"))
        group[rank].close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return outcomes


def _run_processes(kind: str, scenario: Any, ranks: int, timeout: float, options: dict[str, Any]) -> list[Outcome]:
    context = forking()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/rendezvous" if not kind.endswith("-tcp") else f"tcp://127.0.0.1:{free_port()}"
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            job = (
                theirs,
                kind,
                sys.modules[scenario.__module__].__file__,
                scenario.__name__,
                place,
                rank,
                ranks,
                timeout,
                options,
            )
            process = context.Process(
                target=runpy.run_path,
                args=(str(Path(__file__)),),
                kwargs={"init_globals": {"JOB": job}, "run_name": "job"},
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], processes: list[Any]) -> list[Outcome]:
    """Wait for all that can still speak: a killed process closes its pipe, a stopped one is given up on."""
    outcomes = [Outcome(silent=True) for _ in pipes]
    deadline = time.monotonic() + LIMIT
    open_pipes = dict(enumerate(pipes))
    while open_pipes and time.monotonic() < deadline:
        for rank, pipe in list(open_pipes.items()):
            try:
                if pipe.poll(0.02):
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                    del open_pipes[rank]
            except EOFError:
                del open_pipes[rank]
        if open_pipes and all(is_stopped(processes[rank].pid) for rank in open_pipes):
            break
    for rank, process in enumerate(processes):
        if rank not in open_pipes:
            process.join(LIMIT)
            outcomes[rank].exit_code = process.exitcode
    return outcomes


def _child(
    pipe: Connection,
    kind: str,
    file: str,
    name: str,
    place: str,
    rank: int,
    ranks: int,
    timeout: float,
    options: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    from penstock.runtime.transport.gloo.transport import DistributedTransport
    from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("scenarios", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenarios"] = module
    sys.path.insert(0, str(Path(__file__).parent))
    spec.loader.exec_module(module)
    os.environ.setdefault("PENSTOCK_SECRET", SECRET)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    transport = (SharedMemoryTransport if kind.startswith("shared") else DistributedTransport)(timeout=timeout)
    try:
        outcome = Outcome(value=getattr(module, name)(transport, **options))
    except BaseException as error:
        outcome = Outcome(error=error)
        transport.abort(PeerFailure(rank, f"the scenario failed: {error!r}"))
    transport.close()
    dist.destroy_process_group()
    try:
        content = pickle.dumps(outcome)
    except Exception:
        content = pickle.dumps(Outcome(error=RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")))
    pipe.send_bytes(content)
    pipe.close()


if __name__ == "job":
    sys.path.insert(0, str(Path(__file__).parent))
    import transport_harness  # so that outcomes are pickled as the parent knows them

    Outcome = transport_harness.Outcome  # type: ignore[misc]
    _child(*JOB)  # type: ignore[name-defined]  # noqa: F821
