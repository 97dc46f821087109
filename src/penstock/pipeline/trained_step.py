"""One step of `Pipeline.train_steps`: what is yielded, what is known until reports are collected, and its update.

An update that all ranks make at the same time ends with an exchange, so that an error of one is an error of all. One
that is made early waits for nobody: the others hear of an error in the next step, and where it depends on all ranks (by
the norm of all gradients) there is a snapshot to take it back by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import PeerFailure, RunError, UsageError
from penstock.parallel.group.agreement import agree
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.state import ModelState
from penstock.runtime.engine.report import EndedStep, StepResult, failure_of
from penstock.runtime.optim.norms import NormAnswer
from penstock.runtime.optim.scaler import GradScaler
from penstock.runtime.optim.snapshot import UpdateSnapshot, WeightsSeen, parameters_of
from penstock.runtime.optim.updates import AS_IS, ORDER, UpdateDecision, Updates
from penstock.runtime.state.transaction import Transaction
from penstock.runtime.transport.failure.peer_failures import placed

CALL = "train_steps()"
_UPDATE = "update after step"
APART = (
    f"an earlier step of {CALL} was not completed, or not updated, on every rank, so that the ranks no longer "
    f"belong together; load a checkpoint on every rank, or make the Pipeline anew"
)


@dataclass(frozen=True)
class TrainedStep(StepResult):
    """What `train_steps` yields for each step: the result of the step, and what became of the update.

    ::

        for step in pipe.train_steps(batches, optimizer, clip=1.0):
            print(f"{step.loss:.3f} {step.norm:.2f}")

    Attributes:
        loss: The loss of the whole batch. It has no graph: gradients are already computed.
        losses: One loss per microbatch, in order.
        extra_losses: The mean of each loss that stages passed to `add_loss`, by name.
        output: Always `None`; for outputs, use `step`.
        norm: The norm of all gradients before clipping, if `clip` or `skip_nonfinite` asked for it.
        updated: Whether the weights were updated.
        steps_done: How many steps of this loop the rank has run when the result comes: one more than the result's own
            where steps overlap. The weights are those after the result's step; after `settle`, which
            `Checkpointer.save` and all other calls that every rank makes do by themselves, after so many steps.
        together: Why all ranks ended this step together, such as `"record()"`; empty if it overlapped with others.
    """

    norm: Tensor | None = None
    updated: bool = True
    steps_done: int = 0
    together: str = ""


@dataclass
class UncollectedStep:
    """A step that is done on this rank, and whose reports are still to be collected."""

    number: int
    ended: EndedStep
    count: int  # Number of microbatches.
    transaction: Transaction
    decision: UpdateDecision = AS_IS
    can_be_undone: bool = False  # The step and its update.
    is_updated: bool = False  # early, on this rank


class Abandoned(Exception):
    """The step that runs counts for nothing: the one before it failed (`error`), or was updated wrongly (None).

    `interrupt`: what the user has ended the step that runs by, if so; it must not be lost with the step.
    """

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error
        self.interrupt: BaseException | None = None


class FailedHere(Exception):
    """Ends a step that has failed on this rank inside its transaction; what is raised comes with the reports."""


def trained(result: StepResult, decision: UpdateDecision, updated: bool, together: str = "") -> TrainedStep:
    """Return the result of a step with what became of its update."""
    values = {each.name: getattr(result, each.name) for each in fields(StepResult)}
    return TrainedStep(**values, norm=decision.norm, updated=updated, together=together)


def which_step(number: int) -> str:
    """Name a step as notes of errors do."""
    return f"in step {number} of {CALL}, counted from 0"


def name_step(error: BaseException, number: int) -> None:
    """Have an error say in which step it was, unless it does so."""
    if not any(f" of {CALL}, counted from 0" in note for note in getattr(error, "__notes__", ())):
        error.add_note(which_step(number))


def failed_update(rank: int, number: int, error: BaseException) -> PeerFailure:
    """Make the error of a rank in the update after that step, as all ranks are told of it."""
    failure = failure_of(rank, error, None)
    failure.action = f"{_UPDATE} {number}"
    return failure


def explain_update(error: BaseException, number: int) -> None:
    """Note what became of the weights in an error of the update after that step, on any rank."""
    error.add_note(
        f"in the update after step {number} of {CALL}, counted from 0; it is not complete on every rank, so that the "
        f"ranks no longer belong together: load a checkpoint on every rank"
    )


def explain(error: BaseException, step: UncollectedStep, runs: bool = False) -> bool:
    """Note in an error which step it was, and what became of the weights; return whether the ranks still belong
    together.

    With `runs`, this rank was in the step after it.
    """
    told = step.ended.told
    failures = {rank: report.failure for rank, report in enumerate(told) if report.failure is not None}
    text = which_step(step.number)
    if any((failure.action or "").startswith(_UPDATE) for failure in failures.values()):
        explain_update(error, step.number - 1)
        return False
    if told and isinstance(error, RunError) and not failures:  # the steps that the ranks have completed differ
        error.add_note(text)
        return False
    belong = bool(told) and (len(failures) == len(told) or step.can_be_undone)
    if belong:
        text += "; it is undone on every rank, and the weights are those of the step before it"
    elif failures:
        text += (
            f"; rank {', '.join(map(str, failures))} could not end it, and the others had ended it and updated their "
            f"weights, so that the ranks no longer belong together: load a checkpoint on every rank"
        )
    elif told:
        text += "; all ranks had ended it and updated their weights: load a checkpoint on every rank"
    elif step.is_updated:
        text = (
            f"{which_step(step.number + runs)}; this rank has updated its weights after step {step.number}, without "
            f"knowing what became of it on the others: load a checkpoint on every rank"
        )
    error.add_note(text)
    return belong or not (told or step.is_updated)


def changed_in_body(changed: Tensor | str, parameters: Iterable[tuple[str, Tensor]]) -> UsageError:
    """Return the error of a body that has changed a parameter or the optimizer between a step and its update."""
    if isinstance(changed, Tensor):
        name = next((name for name, each in parameters if each is changed), tuple(changed.shape))
        changed = f"parameter {name} (or its gradient)"
    return UsageError(
        f"{changed} was changed in the body of train_steps(), where this rank has run the next step already, with the "
        f"weights as they were; call pipe.settle() before you change parameters or the optimizer, on every rank"
    )


Found = TypeVar("Found")


class WeightUpdates:
    """How the weights of this process are updated after each step of a loop."""

    failed: PeerFailure | None = None  # an early update, of which the other ranks do not know yet

    def __init__(self, deployment: Deployment, state: ModelState, updates: Updates) -> None:
        self._deployment, self._state, self.updates = deployment, state, updates
        self._snapshot = UpdateSnapshot(updates.optimizer, updates.scheduler)
        self._aside: list[tuple[Tensor, Tensor | None]] = []  # gradients of a step that the update is to follow
        self._before_body: WeightsSeen | None = None

    @property
    def scaler(self) -> GradScaler | None:
        scaler = self._state.scaler
        return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None

    def decide(self, loss: float | None) -> UpdateDecision:
        """Return what to do after a step that has ended on all ranks together."""
        scaler = self.scaler
        if scaler is not None:
            scaler.unscale_(self.updates.optimizer)
        parts: list[NormAnswer] = []
        if self.updates.depends_on_all:
            norm = self._state.grad_norm(ORDER)
            parts = [(norm.item(), norm.dtype)]
        return self.updates.decide(parts, loss)

    # -- with all ranks

    def update_with_all(self, number: int, decision: UpdateDecision) -> bool:
        """Update the weights on all ranks, after step `number`; returns whether they were updated."""
        return self._agree(number, partial(self._update, decision))

    def settle(self, step: UncollectedStep) -> None:
        """See on all ranks that the update after a step is made, once its reports are collected, and the right one."""
        self._agree(step.number, partial(self._settle, step))

    def _settle(self, step: UncollectedStep) -> None:
        refused = None if step.is_updated else self.changed_in_body()
        if refused is not None:
            raise refused
        wrong = step.is_updated and not step.decision.as_is
        if wrong and self.failed is not None:  # Taken back like one that was made.
            self.failed = None
            self._deployment.counter.step += 1
        if self.failed is not None and self.failed.__cause__ is not None:
            raise self.failed.__cause__
        if wrong or not step.is_updated:
            self._put_gradients_back()
            self._update(step.decision, again=wrong)
            step.is_updated = True

    def _agree(self, number: int, update: Callable[[], Found]) -> Found:
        """Make an update that all ranks make at the same time: an error of one is an error of all."""
        transport, replication = self._deployment.world.transport, self._deployment.replication
        if transport is None:
            return update()

        def exchange(answer: Any) -> list[Any]:
            answers = transport.post_exchange(answer)()  # Ctrl-C may end the wait, and they are collected later
            return [each for copy in replication.all_gather(transport.call, answers) for each in copy]

        def describe(error: BaseException) -> PeerFailure:
            axes = {"replica": replication.index} if replication.replicas > 1 else {}
            return placed(failed_update(transport.rank, number, error), axes)

        made: list[Found] = []
        try:
            agree(lambda: made.append(update()), exchange, describe=describe, refuse=lambda _, failure: failure)
        except Exception as error:
            explain_update(error, number)
            self._deployment.counter.is_apart = True
            raise
        return made[0]

    def _update(self, decision: UpdateDecision, again: bool = False) -> bool:
        """Update the weights, `again` where a wrong update is to be taken back first.

        Until that is done, this rank has not completed the step: a rank that stops in between is found out by the
        others, when they compare how many steps they have completed.
        """
        counter = self._deployment.counter
        counter.step -= 1
        with self._snapshot.again() if again else nullcontext():
            updated = self.updates.apply(decision, list(self._state.parameters()), self.scaler)
        counter.step += 1
        return updated

    # -- early

    def set_aside(self) -> None:
        """Have the body of the loop see the weights before the update, and no gradients, as after the step before."""
        self._before_body = WeightsSeen(self.updates.optimizer)
        self._aside = [
            (each, each.grad) for each in (*self._state.parameters(), *parameters_of(self.updates.optimizer))
        ]
        for parameter, _ in self._aside:
            parameter.grad = None

    def _put_gradients_back(self) -> None:
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []

    def update_early(self, number: int, may_be_wrong: bool) -> None:
        """Update the weights without a word of the others. They are told of an error in the next step.

        What `may_be_wrong` can be taken back.
        """
        transport = self._deployment.world.transport
        assert transport is not None
        self._put_gradients_back()
        if may_be_wrong:
            self._snapshot.take()
        try:
            self._update(AS_IS)
        except Exception as error:
            self.failed = failed_update(transport.rank, number, error)
            self.failed.__cause__ = error

    def changed_in_body(self) -> UsageError | None:
        """Return why not to go on: the user has changed what an update by the gradients of a later step belongs to."""
        seen, self._before_body = self._before_body, None
        changed = None if seen is None else seen.changed()
        return None if changed is None else changed_in_body(changed, self._state.named_parameters())

    def undo(self, step: UncollectedStep) -> None:
        """Take the last update back if it was made, and make none."""
        self._aside, self._before_body = [], None
        if step.is_updated:
            self._snapshot.put_back()
        self._state.zero_grad()
