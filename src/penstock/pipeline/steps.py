"""Steps and evaluations of a pipeline: guards in, split, run, guards out, result.

A *guard* surrounds a call. It is a function of the `Run` that begins, and returns the context to run it in, or None
where there is nothing to leave again. `step`, `train_steps`, `evaluate` and `predict` enter the same guards, in the
order of `AROUND_STEP` and then `AROUND_RUN`, and leave them in the opposite order, with the reports of all ranks or
with an error. All of them are inside of `LocalRanks.in_call`: from there on Ctrl-C waits, so that it comes neither
between two guards nor where no other rank would hear of it.

Why in this order:

    following    First, because all others look at the model: no rank is late, and stages follow what the user has set.
    first        It refuses a model that another pipeline trains, while nothing of it has been touched. When a first
                 step is complete, the values of other ranks are let go: after all that could still undo the step.
    counted      All ranks agree on the program, before something depends on the number of microbatches.
    recorded     The clock is read outside of all that the step costs.
    undone       From here on the model changes, and a failure puts all of it back. When those below are left, the step
                 counts: statistics that wait for a whole batch, and the number of steps, are a part of it.
    evaluating   The modes of modules, which are put back before a transaction looks at them.
    tied         Gradients of parameters that several stages share are added up when those of replicas are.
    replicated   Copies hear of an error before their own wait for this one ends.
    drawing      Innermost, since only the making of the batch and the program draw random numbers, and compute in the
                 precision of forwards: who waits for copies has neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.pipeline.batches import Batches, Call
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.state import ModelState
from penstock.runtime.engine.recorder import Recorder, WallStart
from penstock.runtime.engine.report import EndedStep, StepReport, StepResult
from penstock.runtime.engine.step_input import Refused
from penstock.runtime.state.transaction import Transaction
from penstock.schedule import Schedule, Timeline
from penstock.schedule.timing.timeline import peaks

if TYPE_CHECKING:
    from penstock.pipeline.train_steps import StepLoop


@dataclass
class Run:
    """One run of a program, as its guards see it."""

    call: Call
    transaction: Transaction
    overlaps: bool = False  # whether ranks begin the next step before all have ended this one
    refused: BaseException | None = None  # why this rank must not run it, if so, for all ranks to hear
    program: Schedule = field(init=False)
    wall_start: WallStart | None = None  # Set where the step is recorded.
    reports: Sequence[StepReport] = ()  # Of all ranks, once it has ended.
    ended: EndedStep | None = None  # Set on this rank, where it overlaps.


class Steps:
    """What a pipeline runs, one call after the other."""

    def __init__(self, deployment: Deployment, batches: Batches, state: ModelState) -> None:
        self.deployment, self.batches, self.state = deployment, batches, state
        self.closed = False
        self.loop: StepLoop | None = None  # The `train_steps` that runs or has an update to make.
        self.recorder: Recorder | None = None
        self.recorded: Timeline | None = None  # the last that was

    def run(self, call: Call) -> StepResult:
        """Run a step or an evaluation, to its end on all ranks."""
        with self.deployment.ranks.in_call(call.name):
            self.check_open()
            ranks = self.deployment.ranks
            run = Run(call, ranks.transactions[0])
            with ExitStack() as guards:
                self.enter(guards, AROUND_STEP, run)
                self.enter(guards, AROUND_RUN, run)
                given = self.batches.resolve(call, run.program.microbatches)
                try:
                    if ranks.only is None:
                        run.reports = ranks.run(run.program, given, wall_start=run.wall_start)
                    else:
                        mine, start = ranks.only.rank, run.wall_start
                        run.reports = ranks.only.run(run.program, given[mine], start, together=True).reports()
                finally:
                    del given  # An error that its own frame holds would keep the whole step alive.
                self.batches.give_back()
            return self.batches.result(call, run.reports, run.program.microbatches)

    def end_here(self, run: Run) -> EndedStep:
        """Run a step on the one rank of this process, whose guards are entered, without waiting for other ranks."""
        only = self.deployment.ranks.only
        assert only is not None
        with ExitStack() as guards:
            self.enter(guards, AROUND_RUN, run)
            given = Refused(run.refused) if run.refused else self.batches.resolve(run.call, run.program.microbatches)
            try:
                run.ended = only.run(run.program, given[only.rank])
            finally:
                del given  # An error that its own frame holds would keep the whole step alive.
            self.batches.give_back()
        return run.ended

    def enter(self, entered: ExitStack, guards: Sequence[Guard], run: Run) -> None:
        for guard in guards:
            context = guard(self, run)
            if context is not None:
                entered.enter_context(context)

    # -- guards

    def _following(self, run: Run) -> None:
        self.deployment.ranks.begin()

    def _first(self, run: Run) -> Entered:
        others = self.state.other_ranks
        if not run.call.training or (others.is_checked and not others.is_filled):
            return None
        if not others.is_checked:
            others.check(self.deployment)
        return self._letting_go()

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        yield
        self.state.other_ranks.let_go(self.deployment)

    def _counted(self, run: Run) -> None:
        programs = self.deployment.programs
        if run.call.training:
            if self.batches.options.split is not None:
                self._take_count(self.batches.take_lengths(run.call, alone=run.overlaps))
            run.program = programs.program
        else:
            run.program = programs.inference(self.batches.count(run.call), self.deployment.replication.lowered)

    def _take_count(self, count: int | None) -> None:
        if count is None or not self.deployment.programs.take(count, self.batches.sizes) or self.recorder is None:
            return
        schedule = self.deployment.schedule
        self.recorder.timeline.take(schedule, peaks(schedule.columns, schedule.forward_only))

    def _recorded(self, run: Run) -> Entered:
        return None if self.recorder is None or not run.call.training else self._recording(self.recorder, run)

    @contextmanager
    def _recording(self, recorder: Recorder, run: Run) -> Iterator[None]:
        run.wall_start = recorder.begin()
        yield
        recorder.keep(run.reports)

    @contextmanager
    def _undone(self, run: Run) -> Iterator[None]:
        ranks, counter, training = self.deployment.ranks, self.deployment.counter, run.call.training
        adds = not self.deployment.replication.sets_aside
        with run.transaction(training=training, adds=adds, loss_fn=self.batches.loss_fn) as before:
            yield
            if training:
                ranks.end_batch()
                counter.step += 1
            else:
                ranks.give_back()
                before.put_back_buffers()
                counter.evaluations += 1

    def _evaluating(self, run: Run) -> Entered:
        if run.call.training:
            return None
        return self.deployment.ranks.evaluating(holding.module for holding in self.deployment.holdings())

    def _tied(self, run: Run) -> Entered:
        return self.deployment.tied.summed() if run.call.training and self.deployment.tied.groups else None

    def _replicated(self, run: Run) -> Entered:
        return None if self.deployment.replication.is_alone else self._meeting_copies(run)

    @contextmanager
    def _meeting_copies(self, run: Run) -> Iterator[None]:
        with self.deployment.replication.step(run.program, run.call.training) as replica:
            yield
            if run.ended is not None:
                replica.meet(run.ended)
            else:
                replica.end(run.reports)

    def _drawing(self, run: Run) -> Entered:
        return self.deployment.ranks.computing()

    # -- between steps

    def settle(self) -> None:
        """Wait until all ranks are done with the steps of a loop, and update the weights after the last."""
        if self.loop is not None:
            self.loop.settle()
            if not self.loop.is_running:
                self.loop = None

    def check_open(self) -> None:
        """Check, before all that other ranks take part in, that the pipeline is open and no rank is in a step."""
        self.check_not_closed()
        self.settle()

    def check_not_closed(self) -> None:
        if self.closed:
            raise UsageError("this pipeline is closed; make a new one from the same model to go on")

    def check_not_in_loop(self) -> None:
        self.check_open()
        if self.loop is not None and self.loop.is_running:
            raise UsageError(
                "this pipeline is in a train_steps() already; they do not nest. If you have left that loop and kept "
                "what train_steps() returned, call close() on it"
            )

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Measure the steps inside, on every rank."""
        self.check_open()
        if self.recorder is not None:
            raise UsageError("this pipeline is in a record() already; they do not nest: use the outer one's timeline")
        deployment, schedule = self.deployment, self.deployment.schedule
        shifts, error = deployment.world.clock_shifts(schedule.ranks)
        held = peaks(schedule.columns, schedule.forward_only)
        cores = 0 if error else deployment.cores
        timeline = Timeline(schedule, (), held, clock_error=error, unit="s", cores=cores)
        self.recorder = recorder = Recorder(timeline, min(deployment.ranks.executors), shifts)
        try:
            with recorder.watching():
                yield timeline
        finally:
            self.recorder = None
        self.recorded = timeline
        if recorder.silent:
            raise UsageError(f"rank {recorder.silent[0]} did not record the step; enter pipe.record() on every rank")


Entered = AbstractContextManager[object] | None
Guard = Callable[[Steps, Run], Entered]

# The reasons for their order are above.
AROUND_STEP: tuple[Guard, ...] = (Steps._following, Steps._first, Steps._counted, Steps._recorded, Steps._undone)
AROUND_RUN: tuple[Guard, ...] = (Steps._evaluating, Steps._tied, Steps._replicated, Steps._drawing)
