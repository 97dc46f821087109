"""`Pipeline.train_steps`: steps that overlap, because no rank waits for the others between two of them.

A call of `step` ends on all ranks together, so that every step pays for filling and draining the pipeline. Here a rank
goes on to the next step, and updates its own weights before it, as soon as its own work is done::

    step()         rank 0  F F B B . . | u F F B B . . |      |: all ranks meet    u: update
                   rank 1  . . F F B B | u . . F F B B |
    train_steps()  rank 0  F F B B u F F B B u F F B B u
                   rank 1  . . F F B B u F F B B u F F B B u

At the end of a step a rank *posts* its report (losses, failure, its part of the gradients' norm) and collects the
reports of the others at the end of the step after it (`EndedStep`). So it is at most one step ahead, and a result comes
one step late. The update after a step is made when the next one begins, and the body of the loop runs before that: it
sees the weights, the optimizer and the learning rate that the plain loop's body sees with that result, and none of them
is taken back later. In the diagram, the body runs before each `u`. Messages of two steps never mix: each channel keeps
its order and each message says its step.

*Updates that depend on all ranks.* The norm of all gradients is known when the last rank is done, and a rank that
waited for it would wait for everybody. Instead it keeps a snapshot of what the update changes, and updates as if the
norm were finite and below the limit. When it collects the reports it knows better, and so does every other rank, from
the same numbers: if the update was wrong, all of them undo the step that they have just run, take the update back,
make the right one, run the body, and run the step again. The result is the same to the last bit; a wrong guess costs
one step. After one, updates wait for the reports until `TRUST` of them in a row would have been right. Where all
reports are here already, as mostly with the rank of the first stage, nothing is guessed and no snapshot kept.

*Failures.* A rank that fails tells the others by its messages, as in any step. But one that has no more messages to
take in that step may be in the next one by then, so the rank that failed also goes through the next step without
computing, and all collect the report of the failure at its end. Ranks that had finished the step have updated their
weights; they undo both steps and take the update back, or say that they cannot (where no snapshot is kept). An
optimizer that fails is a failure of the step that begins then, or of the meeting that ends the loop.

*Replicas.* At the end of a step a rank meets its copies in the other replicas (`Replication.meet`). What it reports to
its own pipeline is what all copies have found, so that the reports of every pipeline say the same.

*Ctrl-C.* It ends a step while the program of one runs, and is held until then (`interrupts`), so that an update is
complete or not begun, and the others hear why this rank leaves. One that ends a wait of `settle` leaves the reports to
be collected later.

*Where steps end together all the same*, with the same results, `TrainedStep.together` says why (`_why_together`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from penstock.pipeline.batches import Call
from penstock.pipeline.steps import AROUND_STEP, Run, Steps
from penstock.pipeline.trained_step import (
    CALL,
    Abandoned,
    FailedHere,
    TrainedStep,
    UncollectedStep,
    WeightUpdates,
    explain,
    name_step,
    trained,
)
from penstock.runtime.engine.report import StepReport, StepResult, all_replicas, result_of
from penstock.runtime.optim.updates import ORDER, UpdateDecision, Updates
from penstock.runtime.transport.interrupts import CTRL_C, CUT
from penstock.schedule import Schedule, verify

TRUST = 4  # right guesses in a row, after a wrong one, before updates are made early again
KEPT = 64  # programs whose proof is remembered
SETTLE = "settle(), after the batches of train_steps() so far"
ABANDONED = f"{CALL}, at the end of a step that is abandoned"


class StepLoop:
    """One run of `train_steps` on one process."""

    is_running = False

    def __init__(self, steps: Steps, updates: Updates) -> None:
        self._steps = steps
        self._weights = WeightUpdates(steps.deployment, steps.state, updates)
        self._uncollected: UncollectedStep | None = None
        self._done: deque[TrainedStep] = deque()
        self._right = TRUST  # guesses in a row
        self._number = 0
        self._interrupt: BaseException | None = None  # what ended a step that is to be run again
        self._proved: dict[int, Schedule] = {}  # programs whose adjacent steps are proved, by their identity

    def run(self, batches: Iterable[Any]) -> Iterator[TrainedStep]:
        """Train on the batches, and yield the result of each step when all ranks are done with it."""
        self._steps.check_not_in_loop()  # When it begins, too; and a loop that was left may have an update to check.
        self._steps.loop, self.is_running = self, True
        try:
            for batch in batches:
                self._steps.check_not_closed()
                call = self._call(batch)
                together = self._why_together()
                if together:
                    self.settle()
                    yield from self._results()
                    self._step_together(call, together)
                else:
                    while not self._step(call):  # The update after the step before is right only now.
                        yield from self._results()
                self._number += 1
                yield from self._results()
            self._end()
            yield from self._results()
            CTRL_C.raise_owed()
        finally:  # left by an error, perhaps, which must not wait for other ranks
            self.is_running = False
            if self._uncollected is None:
                self._steps.loop = None

    def _results(self) -> Iterator[TrainedStep]:
        while self._done:
            yield replace(self._done.popleft(), steps_done=self._number)

    def settle(self) -> None:
        """Wait until all ranks are done with the steps so far, and update the weights after the last of them."""
        step = self._uncollected
        if step is None:
            return
        with self._steps.deployment.ranks.in_call(SETTLE, settles=True):
            try:
                self._collect()
            except Abandoned as abandoned:
                self._leave(step, abandoned)
            self._weights.settle(step)

    def _end(self) -> None:
        """Wait for all ranks after the last batch, also where all of them know of all steps: one may have more batches,
        and would wait in the next step for those that have gone on to something else.
        """
        if self._uncollected is not None:
            return self.settle()
        deployment = self._steps.deployment
        transport = deployment.world.transport
        if transport is not None:
            with deployment.ranks.in_call(SETTLE, settles=True):
                transport.post_exchange(None)()
                deployment.replication.all_gather(transport.call, None)

    def _call(self, batch: Any) -> Call:
        """Return what `step` would be given. (The training command's batches are calls already.)"""
        if isinstance(batch, Call):
            return batch
        if isinstance(batch, Mapping):
            given = dict(batch)
            target, loss_kwargs = given.pop("target", None), given.pop("loss_kwargs", None) or {}
            return Call(CALL, (), given, target, loss_kwargs, False, training=True)
        values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if self._steps.batches.loss_fn is None:
            return Call(CALL, values, {}, None, {}, False, training=True)
        return Call(CALL, values[:-1], {}, values[-1], {}, False, training=True)

    def _why_together(self) -> str:
        """Return why the next step ends on all ranks together; empty where it may begin while others are behind."""
        deployment, batches, other_ranks = self._steps.deployment, self._steps.batches, self._steps.state.other_ranks
        reasons = {
            "ranks are threads": deployment.world.transport is None,
            "the first step of a pipeline": not (batches.has_compared and other_ranks.is_checked)
            or other_ranks.is_filled,
            "sharded or spread parameters": not deployment.replication.overlaps,
            "weights that are tied across ranks": bool(deployment.tied.groups),
            "a GradScaler": self._weights.scaler is not None,
            "hooks of the optimizer, or objects that it holds": self._weights.updates.depends_on_all
            and not self._weights.updates.can_be_taken_back,
            "hooks of parameters that want complete gradients": deployment.ranks.transactions[0].has_hooks(),
            "BatchOptions(inputs='first')": batches.options.inputs == "first",
            "by_tokens without the lengths on every rank": batches.options.split is not None
            and not batches.have_lengths,
            "record()": self._steps.recorder is not None,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    # -- steps that end together

    def _step_together(self, call: Call, why: str) -> None:
        weights = self._weights
        with self._steps.deployment.ranks.in_call(weights.updates.call, in_loop=True):
            try:
                result = self._steps.run(replace(call, name="step()"))
            except BaseException as error:
                name_step(error, self._number)
                raise
            decision = weights.decide(None if result.loss is None else result.loss.item())
            updated = weights.update_with_all(self._number, decision)
            self._done.append(trained(result, decision, updated, why))

    # -- steps that overlap

    def _step(self, call: Call) -> bool:
        """Update after the step before, and run one step on this rank; errors name it.

        Returns whether it counts: it does not where it ran on weights that were updated wrongly. Then they are right
        now, and it is to be run again, or refused if Ctrl-C has ended it.
        """
        ranks, before = self._steps.deployment.ranks, self._uncollected
        try:
            with ranks.in_call(self._weights.updates.call, in_loop=True):
                try:
                    refused, self._interrupt = self._interrupt, None
                    self._run_and_report(call, refused if before is None else self._update_early(before))
                except Abandoned as abandoned:
                    self._interrupt = abandoned.interrupt
                    assert before is not None
                    ranks.reset()  # what the abandoned run left behind, if it failed
                    self._leave(before, abandoned)
                    self._weights.settle(before)
                    return False
        except BaseException as error:
            name_step(error, self._number)
            raise
        return True

    def _update_early(self, step: UncollectedStep) -> BaseException | None:
        """Update the weights after a step whose reports are not collected yet; returns why the next one must fail.

        The body of the loop has run since that step, with the weights before this update.
        """
        weights = self._weights
        if step.ended.failure is not None:
            return step.ended.failure
        if step.is_updated:  # The next step did not begin: its batch was refused.
            return weights.failed
        depends = weights.updates.depends_on_all
        is_right = depends and self._is_known_to_be_as_is(step)
        step.can_be_undone &= not is_right
        refused = weights.changed_in_body()
        weights.update_early(step.number, may_be_wrong=depends and not is_right)
        step.is_updated = True
        return refused or weights.failed

    def _run_and_report(self, call: Call, refused: BaseException | None) -> None:
        """Run a step, and where the last guess was wrong wait for all reports, to update the weights by them."""
        depends, had_gradients = self._weights.updates.depends_on_all, self._has_gradients()
        waits = depends and self._right < TRUST
        mine = self._run(call, waits, refused)
        if waits:
            self._weights.update_with_all(mine.number, mine.decision)
            return
        mine.can_be_undone = depends and not had_gradients
        self._uncollected = mine
        if mine.ended.failure is None:
            self._weights.set_aside()

    def _is_known_to_be_as_is(self, step: UncollectedStep) -> bool:
        reports = step.ended.known_reports()
        return reports is not None and self._decide(reports, self._result(reports, step)).as_is

    def _has_gradients(self) -> bool:
        """Return whether there are gradients from before this loop, which no snapshot has."""
        return self._uncollected is None and any(each.grad is not None for each in self._steps.state.parameters())

    def _run(self, call: Call, waits: bool, refused: BaseException | None) -> UncollectedStep:
        """Run a step here, collect the reports of the one before it, and post the report of this one.

        With `waits`, all reports of this one are collected too. What is `refused` is not run, but told to all ranks.
        """
        steps, transactions = self._steps, self._steps.deployment.ranks.transactions
        run = Run(call, transactions[self._number % 2], overlaps=True, refused=refused)
        mine: UncollectedStep
        try:
            with ExitStack() as guards:
                steps.enter(guards, AROUND_STEP, run)
                self._prove(run.program)
                ended = steps.end_here(run)
                mine = UncollectedStep(self._number, ended, run.program.microbatches, run.transaction)
                try:
                    self._collect(runs=True)
                except Abandoned as abandoned:
                    abandoned.interrupt = ended.interrupt
                    raise
                if ended.failure is None and self._weights.updates.depends_on_all:
                    ended.report.norm = steps.state.partial_norm(ORDER)
                if waits:
                    self._read_at_once(mine)
                else:
                    ended.post()
                if ended.failure is not None:
                    raise FailedHere
        except FailedHere:
            pass
        return mine

    def _prove(self, program: Schedule) -> None:
        if self._proved.get(id(program)) is not program:
            verify(program, steps=2)
            if len(self._proved) >= KEPT:
                self._proved.clear()
            self._proved[id(program)] = program

    def _collect(self, runs: bool = False) -> None:
        """Read the reports of the step that is past. Raises `Abandoned` if it failed, or was updated wrongly.

        With `runs`, this rank has run another step since, which all ranks then leave with nothing on the wires. A wait
        that Ctrl-C has ended leaves the reports to be collected later.
        """
        transport, before = self._steps.deployment.world.transport, self._uncollected
        assert transport is not None
        if before is None:
            return
        abandoned: Abandoned | None = None
        try:
            self._read(before)
        except BaseException as error:  # raised again, once this step is undone
            if isinstance(error, KeyboardInterrupt) and (CTRL_C.state is CUT or not before.ended.told):
                raise
            self._explain(error, before, runs)
            error.__cause__ = error.__cause__ or (self._weights.failed and self._weights.failed.__cause__)
            abandoned = Abandoned(error)
        self._uncollected = None
        if abandoned is None and before.is_updated and not before.decision.as_is:
            abandoned = Abandoned(None)
        if abandoned is not None:
            if runs and before.ended.told and transport.broken is None:  # All ranks know, and do the same.
                transport.call, call = ABANDONED, transport.call
                try:
                    transport.exchange(None)
                finally:
                    transport.call = call
            raise abandoned

    def _read_at_once(self, step: UncollectedStep) -> None:
        step.can_be_undone = True
        try:
            self._read(step, "clipping, or a skip, of late")
        except BaseException as error:
            self._explain(error, step)
            raise

    def _explain(self, error: BaseException, step: UncollectedStep, runs: bool = False) -> None:
        """Say what became of that step; where the ranks no longer belong together, none goes on."""
        if not explain(error, step, runs):
            self._steps.deployment.counter.is_apart = True

    def _read(self, step: UncollectedStep, together: str = "") -> None:
        """Read the reports of a step, as its decision and its result; raise what went wrong anywhere."""
        reports = step.ended.reports()
        result = self._result(reports, step)
        step.decision = self._decide(reports, result)
        self._right = self._right + 1 if step.decision.as_is else 0
        self._done.append(trained(result, step.decision, step.decision.applied, together))

    def _result(self, reports: list[StepReport], step: UncollectedStep) -> StepResult:
        return result_of(reports, all_replicas(reports, step.count), None)

    def _decide(self, reports: list[StepReport], result: StepResult) -> UpdateDecision:
        loss = None if result.loss is None else result.loss.item()
        return self._weights.updates.decide([report.norm for report in reports], loss)

    def _leave(self, before: UncollectedStep, abandoned: Abandoned) -> None:
        error = abandoned.error
        if error is None:
            return
        if before.ended.told and before.ended.failure is None and before.can_be_undone:
            self._undo(before, error)
        if abandoned.interrupt is not None:
            for note in getattr(error, "__notes__", ()):  # They say with which step to go on.
                abandoned.interrupt.add_note(note)
            raise abandoned.interrupt from error
        raise error from error.__cause__

    def _undo(self, step: UncollectedStep, error: BaseException) -> None:
        counter = self._steps.deployment.counter
        counter.step -= 1
        self._weights.undo(step)
        if not step.transaction.take_back():
            counter.is_apart = True
            error.add_note("this rank could not undo all of it: load a checkpoint on every rank")
        self._steps.deployment.ranks.give_back()
