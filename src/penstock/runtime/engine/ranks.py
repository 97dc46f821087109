"""The ranks of a pipeline that live in this process: all of them as threads, or one of them.

`Pipeline` speaks to its `LocalRanks` and does not know which it is. On threads, every rank has its
own worker, kept for the pipeline's life, because torch keeps thread pools of its own for each
thread that computes. What the caller's thread has set for autocast holds for the workers' forwards too, and so do its
context variables.
"""

from __future__ import annotations

import contextvars
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from penstock.devices import CPU
from penstock.errors import RunError, UsageError
from penstock.model.original.changes import Changes
from penstock.model.part import StagePart
from penstock.model.staged_model import StagedModel
from penstock.runtime.backward.saved_graph import own_by_hook
from penstock.runtime.engine.computations import Mailbox
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.rank_threads import GeneratorTimeout, RankThreads
from penstock.runtime.engine.recorder import WallStart
from penstock.runtime.engine.report import StepReport
from penstock.runtime.engine.stage import Stage
from penstock.runtime.engine.step_input import Refused, StepInput
from penstock.runtime.optim.precision import Precision, caller_precision, empty_cache
from penstock.runtime.state.dual_levels import notice_dual_levels
from penstock.runtime.state.randomness import (
    Compute,
    RankGenerators,
    StageRandomness,
    StepCounter,
    ThreadRandomness,
    generators_of_step,
    seeded,
)
from penstock.runtime.state.transaction import Transaction
from penstock.runtime.transport import Transport
from penstock.runtime.transport.failure.peer_failures import stopped_by_force
from penstock.runtime.transport.failure.silence import COMPILATIONS
from penstock.runtime.transport.interrupts import CTRL_C, CUT
from penstock.schedule import Placement, Schedule


@contextmanager
def calling(transport: Transport, call: str) -> Iterator[None]:
    """A context in which this process is in a call that all ranks must make; the outermost name is kept."""
    outer, transport.call = transport.call, transport.call or call
    try:
        yield
    finally:
        transport.call = outer


class LocalRanks:
    """The local ranks: one executor for each transport that was given."""

    precision: torch.dtype | None = None  # of forwards, float32 for no autocast; None: what the caller has
    keeps_casts = True  # of weights, for a whole step; not where weights are in memory for a part of it only

    def __init__(
        self,
        staged: StagedModel,
        placement: Placement,
        transports: Sequence[Transport],
        counter: StepCounter,
        devices: Mapping[int, torch.device | None],
        stage_type: type[Stage] = Stage,
    ) -> None:
        self.counter = counter
        self._stage_type = stage_type
        self._devices = devices
        self.transports = list(transports)
        self._inside = False
        self._patience = GeneratorTimeout(transports)
        self._takes_turns = len(transports) > 1 or stage_type.attached
        if self._takes_turns:
            notice_dual_levels()
        self.thread_randomness = ThreadRandomness(counter.seed_for, self._patience.waits)
        self._generators = {transport.rank: RankGenerators() for transport in transports}
        self._threads: RankThreads | None = None  # of ranks that are threads, from their first step on
        self.executors: dict[int, Executor] = {}
        for transport in transports:
            rank = transport.rank
            stages = {
                index: stage_type(
                    staged.parts[index],
                    self._randomness(staged.parts[index], rank),
                    is_last=index == staged.stages - 1,
                    loss=staged.loss.module if staged.loss is not None and staged.loss.stage == index else None,
                )
                for index in placement.stages_of(rank)
            }
            for index, stage in stages.items():
                stage.part.around = self._generators[rank].unit_stream
                others = (part for part in staged.parts if part.index != index and not part.reads_inputs)
                stage.guarded.others_take = () if stage.part.reads_inputs else [part.takes for part in others]
            mailbox = Mailbox(rank, placement, staged.topology, transport)
            self.executors[rank] = Executor(rank, stages, mailbox, transport)
        has_last = (each for each in self.executors.values() if any(stage.is_last for stage in each.stages.values()))
        self.last = next(has_last, None)  # the local executor that has the last stage
        self.only = next(iter(self.executors.values())) if len(transports) == 1 else None  # where no threads are needed
        # what undoes a failed step: two, for a step of `train_steps` may be undone when the next one has run
        self.transactions = (self._make_transaction(), self._make_transaction())
        self._model = staged.model
        self.track_changes()

    def track_changes(self) -> None:
        """From here on, what is done to the user's model is followed or refused."""
        self.changes = Changes(self._model, [stage.part for stage in self._stages()])

    def begin(self) -> None:
        """Before a step: no rank may be late, and the stages follow what was done to the model."""
        self.wait_for_late_ranks()
        self.follow()

    def follow(self) -> None:
        """Before a step: what the user has set on the model reaches its stages."""
        if self.changes.follow():
            self.thread_randomness.forget()

    def successor(self, staged: StagedModel, placement: Placement) -> LocalRanks:
        """The ranks for another cut, on the same transports; these must not be used any more."""
        if self._threads is not None:
            self._threads.workers.stop()
        after = LocalRanks(staged, placement, self.transports, self.counter, self._devices, self._stage_type)
        after.precision, after.keeps_casts = self.precision, self.keeps_casts
        return after

    def _randomness(self, part: StagePart, rank: int) -> StageRandomness:
        if self._takes_turns:
            return self.thread_randomness.of(part.index, part.stream, part.module, self._generators[rank])
        return seeded(self.counter, part.stream, self._generators[rank])

    @contextmanager
    def in_call(self, call: str, in_loop: bool = False, settles: bool = False) -> Iterator[None]:
        """Surround a step or an evaluation: on processes, other ranks hear which call this one is in, and Ctrl-C is
        raised where they can hear of that, too (`CtrlC.around_step`).
        """
        transport = self.transports[0]
        if not transport.holds_interrupts:
            yield
            return

        def give_up() -> None:
            if transport.broken is None:
                transport.abort(stopped_by_force(transport.rank))

        with CTRL_C.around_step(in_loop, settles, give_up), calling(transport, call):
            yield

    @contextmanager
    def computing(self, alone: Iterable[Compute] = ()) -> Iterator[None]:
        """Enter a step or an evaluation: one at a time, with its own random numbers and precision.

        `alone` is for the backward of a step whose forward ran by itself: which computes of it drew
        (`ThreadRandomness.alone`).
        """
        if self._inside:
            raise UsageError("this pipeline is in a step already; use it from one thread at a time")
        self._inside = True
        if "torch._dynamo" in sys.modules:
            COMPILATIONS.listen()
        try:
            for rank, generators in self._generators.items():
                self.executors[rank].device = device = self.home(rank)
                if device != generators.home:
                    generators.draw_on(device)
            every = dict.fromkeys(device for each in self._generators.values() for device in each.devices)
            with generators_of_step(every, self._takes_turns) as locks, self.precise():
                if self._takes_turns:
                    self.thread_randomness.begin(locks, alone)
                yield
        finally:
            self._inside = False

    def run(
        self,
        program: Schedule,
        given: Mapping[int, StepInput] | Refused,
        *,
        wall_start: WallStart | None = None,
        variables: contextvars.Context | None = None,
    ) -> list[StepReport]:
        """The program on all local ranks, inside of `step()`; every rank's report, or the one failure that ended it.

        `variables` are the context variables that workers see; without any, those of the caller.
        """
        if self.only is None:
            if isinstance(given, Refused):
                raise given.error
            self._threads = self._threads or self._start_threads()
            homes = {rank: self.home(rank) for rank in self.executors}
            return self._threads.run(program, given, wall_start, variables or contextvars.copy_context(), homes)
        run = partial(self.only.run, program, given[self.only.rank], wall_start, together=True)
        try:
            return (run() if variables is None else variables.copy().run(run)).reports()
        finally:
            del run, given  # an error that its own frame holds would keep the whole step alive

    @contextmanager
    def precise(self) -> Iterator[list[Precision | None]]:
        """Inside, forwards are under `precision`, or else under the autocast that the caller has; nothing else is."""
        caller = caller_precision() if torch._C._is_any_autocast_enabled() else None
        chosen: list[Precision | None] = []
        for rank, executor in self.executors.items():
            own = caller if self.precision is None else Precision.on(self.precision, [self.home(rank).type])
            if own is not None and not self.keeps_casts:
                own = Precision(own.modes, cached=False)
            chosen.append(own)
            for stage in executor.stages.values():
                stage.precision = own
        if caller is None and self.precision is None:
            yield chosen
            return
        empty_cache()
        try:
            with nullcontext() if caller is None else caller.off():
                yield chosen
        finally:
            empty_cache()

    def home(self, rank: int) -> torch.device:
        """Where a local rank computes: on the device that it was given, or else where its parameters are."""
        device = self._devices.get(rank)
        if device is None:
            modules = [stage.module for stage in self.executors[rank].stages.values()]
            found = (parameter.device for module in modules for parameter in module.parameters())
            device = next((each for each in found if each.type != "meta"), CPU)
        return device

    def _start_threads(self) -> RankThreads:
        threads = RankThreads(self.executors, self.transports[0].abort, self.reset)
        # At the end of the process they are left as they are: idle threads wait for ever, and it ends without them.
        weakref.finalize(self, threads.workers.stop).atexit = False
        self._patience.ranks = threads.workers.ranks
        if not self._stage_type.attached:
            for hook in own_by_hook([stage.fresh for stage in self._stages()]):
                weakref.finalize(self, hook.remove)
        return threads

    def wait_for_late_ranks(self) -> None:
        """Before anything that uses the stages: no rank may be in a step that failed, and what one did is undone."""
        if self._threads is None or not self._threads.late:
            return
        if late := self._threads.wait_for_late():
            lines = "; ".join(f"rank {rank} {executor.progress()}" for rank, executor in self.executors.items())
            raise RunError(
                f"{len(late)} ranks are still running their own code after a step that failed ({lines}); "
                f"wait for them, or make a new Pipeline of a copy of the model: they may still write to this one"
            )
        self.reset()
        for transaction in self.transactions:
            transaction.undo_late()

    def _is_lost(self) -> bool:
        """Return whether the group of processes is lost, or given up. (Threads have no link that could be.)"""
        transport = self.transports[0]
        return transport.holds_interrupts and (transport.broken is not None or CTRL_C.state is CUT)

    def _late_ranks(self) -> Iterable[int]:
        return () if self._threads is None else self._threads.late

    def _make_transaction(self) -> Transaction:
        stages = {rank: executor.stages for rank, executor in self.executors.items()}
        last = None if self.last is None else self.last.rank
        return Transaction(stages, last, self.counter, self._late_ranks, self._is_lost)

    @contextmanager
    def evaluating(self, held: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Inside, what the stages hold is in eval mode, and their random numbers are those of evaluations."""
        modules = [module for each in held for module in each.modules()]
        modes = [(module, module.training) for module in modules]
        self.counter.training = False
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            self.counter.training = True

    def end_batch(self) -> None:
        """A batch has gone forward: the statistics that wait for a whole batch are updated."""
        for stage in self._stages():
            if stage.statistics is not None:
                stage.statistics.commit()
        self.give_back()

    def give_back(self) -> None:
        """What replayed units have set on themselves is set on the user's, too."""
        self.changes.give_back()

    def _stages(self) -> list[Stage]:
        return [stage for executor in self.executors.values() for stage in executor.stages.values()]

    def reset(self) -> None:
        """Forget what a failed step left behind."""
        for executor in self.executors.values():
            executor.computations.clear()
        if len(self.transports) > 1:
            for transport in self.transports:
                transport.reset()

    def close(self) -> None:
        """End the workers and give back what the transports hold."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        for executor in self.executors.values():
            executor.forget_channels()
        for transport in self.transports:
            transport.close()

    def modules(self) -> dict[int, torch.nn.Module]:
        """The modules of the local stages, in the order of stages."""
        stages = (pair for executor in self.executors.values() for pair in executor.stages.items())
        return {index: stage.module for index, stage in sorted(stages, key=lambda pair: pair[0])}
