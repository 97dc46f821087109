"""The ranks of a pipeline that live in this process: all of them as threads, or one of them.

`Pipeline` speaks to a `Crew` and does not know which it is. On threads, every rank has its
own worker, kept for the pipeline's life, because torch keeps thread pools of its own for each
thread that computes. What the caller's thread has set for autocast holds for the workers too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import PeerFailure, RunError, UsageError
from penstock.model.split import Split
from penstock.runtime.executor import Executor, StepInput, StepReport
from penstock.runtime.mailbox import Mailbox
from penstock.runtime.randomness import RandomTurns, seed_generators, seed_of
from penstock.runtime.stage import Stage
from penstock.runtime.transport import Transport
from penstock.schedule import Placement, Schedule

__all__ = ["Clock", "Crew"]

TURNS = RandomTurns()  # torch has one generator in a process, so there is one of these


class Clock:
    """Which step it is, for the random numbers; evaluation has a count of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.evaluations = 0
        self.training = True

    def seed_for(self, microbatch: int, stage: int) -> int:
        """The seed of one compute of the step that runs now."""
        if self.training:
            return seed_of(self.seed, self.step, microbatch, stage)
        return seed_of(~self.seed, self.evaluations, microbatch, stage)


class _NoTurn:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class Crew:
    """The local ranks: one executor for each transport that was given."""

    def __init__(
        self,
        split: Split,
        placement: Placement,
        transports: Sequence[Transport],
        clock: Clock,
        devices: Mapping[int, torch.device | None],
    ) -> None:
        self.clock = clock
        self.transports = list(transports)
        self._threads = len(transports) > 1
        self._inside = False
        self.executors: dict[int, Executor] = {}
        for transport in transports:
            rank = transport.rank
            stages = {
                index: Stage(
                    split.parts[index],
                    self._turn(index, devices.get(rank)),
                    is_last=index == split.stages - 1,
                )
                for index in placement.stages_of(rank)
            }
            mailbox = Mailbox(rank, placement, split.topology, transport)
            self.executors[rank] = Executor(rank, stages, mailbox, transport)
        self._pool: ThreadPoolExecutor | None = None

    def _turn(self, stage: int, device: torch.device | None) -> Callable[[str, int], Any]:
        clock, nothing = self.clock, _NoTurn()
        if self._threads:
            return lambda kind, microbatch: TURNS.turn(f"{kind} of stage {stage}", clock.seed_for(microbatch, stage))

        def seeded(kind: str, microbatch: int) -> _NoTurn:
            if kind == "F":
                seed_generators(clock.seed_for(microbatch, stage), device)
            return nothing

        return seeded

    def run(self, program: Schedule, given: Mapping[int, StepInput], *, record: bool = False) -> list[StepReport]:
        """One step on all local ranks; every rank's report, or the one failure that ended it."""
        if self._inside:
            raise UsageError("this pipeline is in a step already; use it from one thread at a time")
        self._inside = True
        state = torch.get_rng_state()
        try:
            if not self._threads:
                ((rank, executor),) = self.executors.items()
                return executor.run(program, given[rank], record=record)
            return self._run_threads(program, given, record)
        finally:
            torch.set_rng_state(state)
            self._inside = False

    def _run_threads(self, program: Schedule, given: Mapping[int, StepInput], record: bool) -> list[StepReport]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self.executors), thread_name_prefix="penstock-rank")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        autocast = _caller_autocast()

        def work(executor: Executor) -> list[StepReport]:
            with autocast():
                return executor.run(program, given[executor.rank], record=record)

        futures = [self._pool.submit(work, executor) for executor in self.executors.values()]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException as error:  # Ctrl-C: stop the ranks, then leave
            self.transports[0].abort(PeerFailure(0, f"stopped by {type(error).__name__}"))
            wait(futures)
            self.reset()
            raise
        wait(futures)
        errors = [found for future in futures if (found := future.exception()) is not None]
        if not errors:
            return futures[0].result()
        self.reset()
        raise next((found for found in errors if found.__cause__ is not None), errors[0])

    def reset(self) -> None:
        """Forget what a failed step left behind."""
        for executor in self.executors.values():
            executor.clear()
        if self._threads:
            for transport in self.transports:
                transport.reset()

    def close(self) -> None:
        """End the workers and give back what the transports hold."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        for transport in self.transports:
            transport.close()

    def last(self) -> Executor | None:
        """The local executor that has the last stage."""
        for executor in self.executors.values():
            if any(stage.is_last for stage in executor.stages.values()):
                return executor
        return None

    def modules(self) -> dict[int, torch.nn.Module]:
        """The modules of the local stages, in the order of stages."""
        found = {index: stage.module for executor in self.executors.values() for index, stage in executor.stages.items()}
        return dict(sorted(found.items()))


def _caller_autocast() -> Callable[[], Any]:
    """What enters, on another thread, the autocast that this thread has."""
    found = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    @contextmanager
    def enter() -> Iterator[None]:
        if not found:
            yield
        elif len(found) == 1:
            with torch.autocast(found[0][0], dtype=found[0][1]):
                yield
        else:
            raise RunError("autocast is on for cpu and cuda at once; choose one around step()")

    return enter
