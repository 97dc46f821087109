"""The updates of one process's weights in `Pipeline.train_steps`: with all ranks, early, made again, or undone.

An update that all ranks make at the same time ends with an exchange, so that an error of one is an error of all. One
that is made early waits for nobody: the others hear of an error in the next step, and where it depends on all ranks (by
the norm of all gradients) there is a snapshot to take it back by.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from penstock.errors import PeerFailure, UsageError
from penstock.parallel.group.agreement import agree
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.state import ModelState
from penstock.pipeline.trained_step import UncollectedStep, changed_in_body, explain_update, failed_update
from penstock.runtime.optim.norms import NormAnswer
from penstock.runtime.optim.scaler import GradScaler
from penstock.runtime.optim.snapshot import UpdateSnapshot, WeightsSeen, parameters_of
from penstock.runtime.optim.updates import AS_IS, ORDER, UpdateDecision, Updates
from penstock.runtime.transport.failure.peer_failures import placed

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
        """The loss scaler, where losses are scaled."""
        scaler = self._state.scaler
        return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None

    def decide(self, loss: float | None) -> UpdateDecision:
        """What to do after a step that has ended on all ranks together."""
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
        if wrong and self.failed is not None:  # it is taken back, as one that was made
            self.failed = None
            self._deployment.counter.step += 1
        if self.failed is not None and self.failed.__cause__ is not None:
            raise self.failed.__cause__
        if wrong or not step.is_updated:
            self._put_gradients_back()
            self._update(step.decision, again=wrong)
            step.is_updated = True

    def _agree(self, number: int, update: Callable[[], Found]) -> Found:
        """An update that all ranks make at the same time: an error of one is an error of all."""
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
