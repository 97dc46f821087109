"""The threads of a pipeline whose ranks live in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any

from penstock.runtime.engine.report import StepReport
from penstock.runtime.transport import ThreadTransport, Transport


class Workers:
    """One thread for each rank. Daemons: a rank that never comes back must not keep the process from its end."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._jobs: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in ranks}
        self._threads = [
            threading.Thread(target=_serve, args=(jobs,), name=f"penstock-rank-{rank}", daemon=True)
            for rank, jobs in self._jobs.items()
        ]
        for thread in self._threads:
            thread.start()
        self.ranks = {thread.ident or 0: rank for thread, rank in zip(self._threads, ranks, strict=True)}

    def submit(self, rank: int, job: Callable[[], list[StepReport]]) -> Future[list[StepReport]]:
        future: Future[list[StepReport]] = Future()
        self._jobs[rank].put((job, future))
        return future

    def stop(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)

    def join(self, seconds: float) -> None:
        deadline = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))


def _serve(jobs: SimpleQueue[Any]) -> None:
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del entry, job, future  # an idle worker holds nothing of a step


class GeneratorTimeout:
    """A rank waits for the generator as for a message: within the timeout, and not in a step that is lost."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.ranks: dict[int, int] = {}  # by thread
        self._transports = {each.rank: each for each in transports if isinstance(each, ThreadTransport)}
        self._since: dict[int, float] = {}

    def waits(self, inside: list[int] | None) -> None:
        """The threads that have the generator now, while this one waits; None when it waits no more."""
        rank = self.ranks.get(threading.get_ident())
        if rank is None:
            return
        if inside is not None:
            peer = next((self.ranks[thread] for thread in inside if thread in self.ranks), None)
            self._transports[rank].waits_elsewhere(peer, monotonic() - self._since.setdefault(rank, monotonic()))
        elif self._since.pop(rank, None) is not None:
            self._transports[rank].waits_elsewhere(None, 0.0)
