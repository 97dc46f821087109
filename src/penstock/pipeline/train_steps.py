"""`Pipeline.train_steps`: steps that overlap, because no rank waits for the others between two of them.

A call of `step` ends on all ranks together, so that every step pays for filling and draining the pipeline. Here a rank
updates its own weights as soon as its own work is done, and begins the next step::

    step()         rank 0  F F B B . . | u F F B B . . |      |: all ranks meet    u: update
                   rank 1  . . F F B B | u . . F F B B |
    train_steps()  rank 0  F F B B u F F B B u F F B B u
                   rank 1  . . F F B B u F F B B u F F B B u

At the end of a step a rank *posts* its report (losses, failure, its part of the gradients' norm) and collects the
reports of the others at the end of the step after it (`EndedStep`). So it is at most one step ahead, and a result comes
one step late. Messages of two steps never mix: each channel keeps its order and each message says its step.

*Updates that depend on all ranks.* The norm of all gradients is known when the last rank is done, and a rank that
waited for it would wait for everybody. Instead it keeps a snapshot of what the update changes, and updates as if the
norm were finite and below the limit, which is nearly always so. When it collects the reports it knows better, and so
does every other rank, from the same numbers: if the update was wrong, all of them undo the step that they have just
run, take the update back, make the right one, and run the step again. The result is the same to the last bit; a wrong
guess costs one step. After one, updates wait for the reports until `TRUST` of them in a row would have been right.

*Failures.* A rank that fails tells the others by its messages, as in any step. But one that has no more messages to
take in that step may be in the next one by then, so the rank that failed also goes through the next step without
computing, and all collect the report of the failure at its end. Ranks that had finished the step have updated their
weights; the error says so where it happens.

*Where steps end together all the same*, with the same results: on threads, which share one optimizer; with tied weights
across ranks, replicas and sharded or spread parameters, whose gradients are exchanged when a step ends; with loss
scaling; where the batch is shared out by one rank or split by its lengths; inside `record()`; and in the first step of
a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from penstock.optim.scaler import GradScaler
from penstock.optim.snapshot import UpdateSnapshot
from penstock.optim.updates import AS_IS, ORDER, Updates, Verdict
from penstock.pipeline.batches import Batches, Call
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.state import ModelState
from penstock.runtime.engine.replication import Replication
from penstock.runtime.engine.report import EndedStep, StepResult, replica_report, result_of
from penstock.runtime.engine.step_input import Refused
from penstock.schedule import Schedule, verify

TRUST = 4  # right guesses in a row, after a wrong one, before updates are made early again
CALL = "train_steps()"


@dataclass(frozen=True)
class TrainedStep(StepResult):
    """What `train_steps` yields for each step: the result of the step, and what became of the update.

    Attributes:
        loss: The loss of the whole batch. It has no graph: gradients are already computed.
        losses: One loss per microbatch, in order.
        extra_losses: The mean of each loss that stages passed to `add_loss`, by name.
        output: Always `None`; for outputs, use `step`.
        norm: The norm of all gradients before clipping, if `clip` or `skip_nonfinite` asked for it.
        updated: Whether the weights were updated.
    """

    norm: Tensor | None = None
    updated: bool = True


@dataclass
class StepParts:
    """What a loop of steps needs of its pipeline."""

    deployment: Deployment
    batches: Batches
    state: ModelState
    begin: Callable[[], None]  # before each step
    together: Callable[[Call], StepResult]  # a step that ends on all ranks together
    transaction: Callable[[], AbstractContextManager[Any]]  # around a step, which is undone if it fails
    is_recording: Callable[[], bool]


@dataclass
class _Uncollected:
    """A step that is done on this rank, and whose reports are still to be collected."""

    number: int
    ended: EndedStep
    count: int  # of microbatches
    verdict: Verdict = AS_IS


class _Abandoned(Exception):
    """The step that runs counts for nothing: the one before it failed (`error`), or was updated wrongly (None)."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error


class _FailedHere(Exception):
    """Ends a step that has failed on this rank inside its transaction; what is raised comes with the reports."""


class StepLoop:
    """One run of `train_steps` on one process."""

    is_running = False

    def __init__(self, parts: StepParts, updates: Updates) -> None:
        self._parts, self._updates = parts, updates
        self._snapshot = UpdateSnapshot(updates.optimizer, updates.scheduler)
        self._uncollected: _Uncollected | None = None
        self._done: deque[TrainedStep] = deque()
        self._right = TRUST  # guesses in a row
        self._number = 0
        self._proved: Schedule | None = None  # the program whose adjacent steps are proved

    def run(self, batches: Iterable[Any]) -> Iterator[TrainedStep]:
        """Train on the batches, and yield the result of each step when all ranks are done with it."""
        self.is_running = True
        try:
            for batch in batches:
                call = self._call(batch)
                if self._overlaps():
                    self._step(call)
                else:
                    self.settle()
                    self._step_together(call)
                self._number += 1
                while self._done:
                    yield self._done.popleft()
            self.settle()
            yield from self._done
        finally:  # left by an error, perhaps, which must not wait for other ranks
            self.is_running = False

    @property
    def is_uncollected(self) -> bool:
        """Whether there is a step whose reports, and so the right update, are not known yet."""
        return self._uncollected is not None

    def settle(self) -> None:
        """Wait until all ranks are done with the steps so far, and see that the weights are the right ones."""
        if self._uncollected is None:
            return
        with self._parts.deployment.ranks.in_call("settle()"):
            before, self._uncollected = self._uncollected, None
            try:
                self._collect(before)
            except _Abandoned as abandoned:
                if abandoned.error is not None:
                    raise abandoned.error from abandoned.error.__cause__
                self._correct(before)

    def _call(self, batch: Any) -> Call:
        """What `step` would be given. (The training command's batches are calls already.)"""
        if isinstance(batch, Call):
            return batch
        if isinstance(batch, Mapping):
            given = dict(batch)
            target, loss_kwargs = given.pop("target", None), given.pop("loss_kwargs", None) or {}
            return Call(CALL, (), given, target, loss_kwargs, False, training=True)
        values = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        if self._parts.batches.loss_fn is None:
            return Call(CALL, values, {}, None, {}, False, training=True)
        return Call(CALL, values[:-1], {}, values[-1], {}, False, training=True)

    def _overlaps(self) -> bool:
        """Whether the next step may begin while other ranks are in the one before it."""
        deployment, options = self._parts.deployment, self._parts.batches.options
        return (
            deployment.world.transport is not None
            and self._parts.batches.has_compared
            and self._parts.state.other_ranks.is_checked
            and not self._parts.state.other_ranks.is_filled
            and type(deployment.replication) is Replication
            and not deployment.tied.groups
            and self._scaler() is None
            and (self._updates.can_be_taken_back or not self._updates.depends_on_all)
            and options.split is None
            and options.inputs != "first"
            and not self._parts.is_recording()
        )

    # -- steps that end together

    def _step_together(self, call: Call) -> None:
        state, updates = self._parts.state, self._updates
        result = self._parts.together(call)
        scaler = self._scaler()
        if scaler is not None:
            scaler.unscale_(updates.optimizer)
        parts: list[Any] = []
        if updates.depends_on_all:
            norm = state.grad_norm(ORDER)
            parts = [(norm.item(), norm.dtype)]
        verdict = updates.judge(parts, None if result.loss is None else result.loss.item())
        self._done.append(_trained(result, verdict, updated=self._update(verdict)))

    def _scaler(self) -> GradScaler | None:
        scaler = self._parts.state.scaler
        return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None

    def _update(self, verdict: Verdict) -> bool:
        state = self._parts.state
        updated = self._updates.apply(verdict, list(state.parameters()), self._scaler())
        state.zero_grad()
        return updated

    # -- steps that overlap

    def _step(self, call: Call) -> None:
        """One step on this rank, and its update; once more where it ran on weights that were updated wrongly."""
        before, self._uncollected = self._uncollected, None
        try:
            mine, waited = self._run(call, before)
        except _Abandoned as abandoned:
            if abandoned.error is not None or before is None:
                error = abandoned.error or abandoned
                raise error from error.__cause__
            self._parts.deployment.ranks.reset()  # what the abandoned run left behind, if it failed
            self._correct(before)
            mine, waited = self._run(call, None)
        if waited:
            self._update(mine.verdict)
            return
        self._uncollected = mine
        if mine.ended.failure is None:
            if self._updates.depends_on_all:
                self._snapshot.take()
            self._update(AS_IS)

    def _run(self, call: Call, before: _Uncollected | None) -> tuple[_Uncollected, bool]:
        """Run a step here, collect the reports of the one before it, and post the report of this one.

        Returns the step, and whether its reports were waited for.
        """
        parts, deployment = self._parts, self._parts.deployment
        waits = self._updates.depends_on_all and self._right < TRUST
        mine: _Uncollected
        with deployment.ranks.in_call(CALL):
            parts.begin()
            program = self._program()
            try:
                with parts.transaction():
                    mine = _Uncollected(
                        self._number, self._run_without_exchange(call, program, before), program.microbatches
                    )
                    if before is not None:
                        self._collect(before, runs=True)
                    if mine.ended.failure is None and self._updates.depends_on_all:
                        mine.ended.report.norm = parts.state.partial_norm(ORDER)
                    if waits:
                        self._read(mine)
                    else:
                        mine.ended.post()
                    if mine.ended.failure is not None:
                        raise _FailedHere
                    deployment.ranks.end_batch()
                    deployment.counter.step += 1
            except _FailedHere:
                pass
        return mine, waits

    def _program(self) -> Schedule:
        program = self._parts.deployment.programs.program
        if program is not self._proved:
            verify(program, steps=2)
            self._proved = program
        return program

    def _run_without_exchange(self, call: Call, program: Schedule, before: _Uncollected | None) -> EndedStep:
        deployment = self._parts.deployment
        failed = None if before is None else before.ended.failure
        with deployment.replication.step(program, training=True), deployment.ranks.step():
            given = self._parts.batches.resolve(call, program.microbatches) if failed is None else Refused(failed)
            return deployment.ranks.run_without_exchange(program, given)

    def _collect(self, before: _Uncollected, runs: bool = False) -> None:
        """Read the reports of a step that is past. Raises `_Abandoned` if it failed, or was updated wrongly.

        With `runs`, this rank has run another step since, which all ranks then leave with nothing on the wires.
        """
        transport = self._parts.deployment.world.transport
        assert transport is not None
        abandoned: _Abandoned | None = None
        try:
            self._read(before)
        except BaseException as error:  # raised again, once this step is undone
            _explain(error, before)
            abandoned = _Abandoned(error)
        if abandoned is None and not before.verdict.as_is:
            abandoned = _Abandoned(None)
        if abandoned is not None:
            if runs and before.ended.told and transport.broken is None:  # so all ranks know, and do the same
                transport.exchange(None)
            raise abandoned

    def _read(self, step: _Uncollected) -> None:
        """The reports of a step, as its verdict and its result; raises what went wrong anywhere."""
        reports = step.ended.reports()
        result = result_of(reports, [replica_report(reports, step.count)], None)
        loss = None if result.loss is None else result.loss.item()
        step.verdict = self._updates.judge([report.norm for report in reports], loss)
        self._right = self._right + 1 if step.verdict.as_is else 0
        self._done.append(_trained(result, step.verdict, step.verdict.applied))

    def _correct(self, step: _Uncollected) -> None:
        """Take the update of a step back, and make the right one."""
        generator = torch.get_rng_state()  # batches were drawn from it since
        self._snapshot.put_back()
        self._update(step.verdict)
        torch.set_rng_state(generator)


def _trained(result: StepResult, verdict: Verdict, updated: bool) -> TrainedStep:
    values = {each.name: getattr(result, each.name) for each in fields(StepResult)}
    return TrainedStep(**values, norm=verdict.norm, updated=updated)


def _explain(error: BaseException, step: _Uncollected) -> None:
    """Which step it was, and what became of the weights, as a note of the error."""
    told = step.ended.told
    failed = [rank for rank, report in enumerate(told) if report.failure is not None]
    text = f"in step {step.number} of {CALL}, counted from 0"
    if told and len(failed) == len(told):
        text += "; it is undone on every rank, and the weights are those of the step before it"
    elif failed:
        text += (
            f"; rank {', '.join(map(str, failed))} could not end it, and the others had ended it and updated their "
            f"weights, so that the ranks no longer belong together: load a checkpoint on every rank"
        )
    error.add_note(text)
