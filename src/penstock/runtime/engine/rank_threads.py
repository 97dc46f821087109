"""The threads of a pipeline whose ranks live in one process."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import torch

from penstock.devices import as_caller, has_accelerator, on_accelerator
from penstock.errors import PeerFailure
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.recorder import WallStart
from penstock.runtime.engine.report import StepReport
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.messages.clock import daemon
from penstock.runtime.transport import ThreadTransport, Transport
from penstock.runtime.transport.failure.peer_failures import whole_again
from penstock.schedule import Schedule

GRACE = 2.0  # seconds: how long a failed step waits for ranks that are busy in the user's code


class Workers:
    """One thread for each rank. Daemons: a rank that never comes back must not keep the process from its end."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._jobs: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in ranks}
        self._threads = [daemon(partial(_serve, jobs), f"penstock-rank-{rank}") for rank, jobs in self._jobs.items()]
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
            # As a thread ends, torch frees the phase that autograd was shown, and needs the interpreter to.
            while (
                has_accelerator() and os.path.exists(f"/proc/self/task/{thread.native_id}") and monotonic() < deadline
            ):
                sleep(0.001)


def _serve(jobs: SimpleQueue[Any]) -> None:
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        del entry, job, future  # an idle worker holds nothing of a step


class RankThreads:
    """The ranks of one pipeline on their threads: runs a step on all of them, and knows who has not left a failed one.

    `abort` ends what ranks wait for, `reset` forgets what a failed step left behind.
    """

    def __init__(
        self, executors: Mapping[int, Executor], abort: Callable[[PeerFailure], None], reset: Callable[[], None]
    ) -> None:
        self._executors, self._abort, self._reset = executors, abort, reset
        self.workers = Workers(list(executors))
        self.late: dict[int, Future[list[StepReport]]] = {}  # ranks that have not left a failed step yet

    def run(
        self,
        program: Schedule,
        given: Mapping[int, StepInput],
        wall_start: WallStart | None,
        variables: contextvars.Context,
        homes: Mapping[int, torch.device],
    ) -> list[StepReport]:
        """Run the program on all ranks, on these devices; return their reports, or raise the failure that ended it."""
        threads, default = torch.get_num_threads(), torch.get_default_device()
        streams = [torch.accelerator.current_stream(each) for each in set(homes.values()) if on_accelerator(each)]

        def work(executor: Executor) -> list[StepReport]:
            if torch.get_num_threads() != threads:  # the user's number is known to the thread that gave it, until asked
                torch.set_num_threads(threads)
            with as_caller(homes[executor.rank], streams, default):
                return executor.run(program, given[executor.rank], wall_start=wall_start, together=True).reports()

        futures: dict[int, Future[list[StepReport]]] = {}
        errors: list[BaseException] = []
        try:
            for rank, executor in self._executors.items():
                futures[rank] = self.workers.submit(rank, partial(variables.copy().run, work, executor))
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            errors = _errors(futures.values())
            if not errors:
                return futures[0].result()
            self._leave(futures)
            errors = _errors(futures.values())
            raise whole_again(min(errors, key=_precedence))  # by `reset`: threads have no link to lose
        except BaseException as error:
            if not errors:  # Ctrl-C: stop the ranks, then leave
                self._abort(PeerFailure(0, f"stopped by {type(error).__name__}"))
                self._leave(futures)
            raise
        finally:
            del futures, errors  # an error that its own frame holds would keep the whole step alive

    def _leave(self, futures: Mapping[int, Future[list[StepReport]]]) -> None:
        """A failed step ends with its ranks, but for those that are deep in the user's code: nobody can stop these."""
        self.late = dict(futures)  # at once: a second Ctrl-C may end the wait
        if not self.wait_for_late():
            self._reset()

    def wait_for_late(self) -> Mapping[int, Future[list[StepReport]]]:
        """Wait a moment for ranks that are late; returns those that still are."""
        wait(self.late.values(), GRACE)
        self.late = {rank: future for rank, future in self.late.items() if not future.done()}
        return self.late

    def close(self) -> None:
        """End the threads."""
        self.workers.stop()
        self.workers.join(GRACE)


def _errors(futures: Iterable[Future[list[StepReport]]]) -> list[BaseException]:
    return [error for future in futures if future.done() and (error := future.exception()) is not None]


def _precedence(error: BaseException) -> int:
    """Of the errors of several ranks: sys.exit() before all, then the one that knows its cause as an exception."""
    if not isinstance(error, PeerFailure):
        return 0
    return 1 if error.__cause__ is not None else 2


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
