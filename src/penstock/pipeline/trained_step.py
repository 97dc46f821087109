"""One step of `Pipeline.train_steps`: what is yielded of it, and what is known of it until reports are collected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor

from penstock.errors import PeerFailure, RunError, UsageError
from penstock.runtime.engine.report import EndedStep, StepResult, failure_of
from penstock.runtime.optim.updates import AS_IS, UpdateDecision
from penstock.runtime.state.transaction import Transaction

CALL = "train_steps()"
_UPDATE = "update after step"
APART = (
    f"an earlier step of {CALL} was not completed, or not updated, on every rank, so that the ranks no longer "
    f"belong together; load a checkpoint on every rank, or make the Pipeline anew"
)


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
    count: int  # of microbatches
    transaction: Transaction
    decision: UpdateDecision = AS_IS
    can_be_undone: bool = False  # with its update
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
    """The result of a step with what became of its update."""
    values = {each.name: getattr(result, each.name) for each in fields(StepResult)}
    return TrainedStep(**values, norm=decision.norm, updated=updated, together=together)


def which_step(number: int) -> str:
    """A step, as notes of errors name it."""
    return f"in step {number} of {CALL}, counted from 0"


def name_step(error: BaseException, number: int) -> None:
    """Have an error say in which step it was, unless it does so."""
    if not any(f" of {CALL}, counted from 0" in note for note in getattr(error, "__notes__", ())):
        error.add_note(which_step(number))


def failed_update(rank: int, number: int, error: BaseException) -> PeerFailure:
    """The error of a rank in the update after that step, as all ranks are told of it."""
    failure = failure_of(rank, error, None)
    failure.action = f"{_UPDATE} {number}"
    return failure


def explain_update(error: BaseException, number: int) -> None:
    """What became of the weights, as a note of an error of the update after that step, on any rank."""
    error.add_note(
        f"in the update after step {number} of {CALL}, counted from 0; it is not complete on every rank, so that the "
        f"ranks no longer belong together: load a checkpoint on every rank"
    )


def explain(error: BaseException, step: UncollectedStep, runs: bool = False) -> bool:
    """Which step it was, and what became of the weights, as a note of the error. Returns whether the ranks still belong
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
