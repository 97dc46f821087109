"""The computes of one rank, each by itself: what it needs is taken, the stage runs, what it made is put up.

In which order they run, and when messages leave, is the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.model.split import OUTPUT
from penstock.runtime.batch.comparison import Readers
from penstock.runtime.batch.fingerprint import Seen
from penstock.runtime.engine.mailbox import Mailbox
from penstock.runtime.engine.replication import Alone
from penstock.runtime.engine.report import StepInput, StepReport
from penstock.runtime.engine.stage import LossOf, Stage
from penstock.runtime.engine.whole_batch import Together
from penstock.runtime.loss.losses import own_loss, with_graph
from penstock.runtime.loss.seeds import Seeds, sum_in_order
from penstock.runtime.state.ownership import Watched, check_unwritten, versions
from penstock.runtime.transport.handover import alias
from penstock.schedule import Op

__all__ = ["Computes"]


class Crossing(Protocol):
    """How values that only mean something among certain ranks leave a stage, and become such values again."""

    def pack(self, value: Any) -> Any:
        """What leaves."""

    def unpack(self, value: Any) -> Any:
        """What has come."""

    def whole(self, value: Any) -> Any:
        """What the user gets to see."""


class Computes:
    """A rank's stages and its mailbox, and the step that they work on."""

    def __init__(self, stages: Mapping[int, Stage], mailbox: Mailbox) -> None:
        self.stages = dict(stages)
        self.mailbox = mailbox
        self.replication = Alone()
        self.gathering: dict[int, Callable[[], None]] = {}  # by stage: waits until its parameters are whole
        self.added: Callable[[int], None] | None = None  # called with a stage that has new gradients
        self.crossing: Crossing | None = None
        self.given: StepInput
        self.report = StepReport()
        self.seen: Seen | None = None  # what this rank was given for the step
        self.readers: Readers | None = None
        self.losses: dict[int, Tensor] = {}  # by microbatch, on the rank of the last stage
        self._split: frozenset[tuple[int, int]] = frozenset()  # (stage, microbatch) whose backward comes as I and W
        self._fetched: dict[tuple[Op, int, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        self._kept: dict[int, Watched] = {}  # the tensors of these outputs
        self._seeds: Seeds | None = None
        self._waited = 0.0
        self._resumed = 0.0  # when the last wait ended
        self._watching = False
        self.together = Together(self)

    def seed_of(self, microbatch: int, loss: Tensor) -> Tensor | None:
        """What enters the backward at the loss of a microbatch."""
        return (self._seeds or self._seeded()).of(microbatch, loss)

    @property
    def extra_seed(self) -> Tensor:
        """What enters it at a named loss."""
        return (self._seeds or self._seeded()).extra

    def _prepare(self, given: StepInput) -> None:
        self.given = given
        self.report.steps = given.steps
        self.report.rows = None if given.batch.rows is None else sum(given.batch.rows)
        self.seen, self.readers = given.seen, given.readers
        self._seeds = None
        for stage in self.stages.values():
            stage.begin_step()

    def _seeded(self) -> Seeds:
        """The seeds of this step; other replicas may have a say in them, which by now has come."""
        self._seeds = Seeds(self.given.shares, len(self.given.batch.args), self.given.scale, self.given.replicas)
        return self._seeds

    def fetch(self, op: Op, stage: int, microbatch: int) -> Any:
        """Wait for what a compute needs, and keep it for that compute."""
        key = (op, stage, microbatch)
        if key not in self._fetched:
            self._fetched[key] = self._await(op, stage, microbatch)

    def _await(self, op: Op, stage: int, microbatch: int) -> Any:
        if self._fetched and (op, stage, microbatch) in self._fetched:
            return self._fetched.pop((op, stage, microbatch))
        if op is Op.W:
            return None
        take = self.mailbox.take_inputs if op is Op.F else self.mailbox.take_gradients
        if not self._watching:
            return take(stage, microbatch)
        begin = perf_counter()
        found = take(stage, microbatch)
        self._resumed = perf_counter()
        self._waited += self._resumed - begin
        return found

    def _forward(self, stage: int, microbatch: int) -> None:
        given, owner = self.given, self.stages[stage]
        arrived = self._await(Op.F, stage, microbatch)
        if self.crossing is not None:
            arrived = {source: self.crossing.unpack(payload) for source, payload in arrived.items()}
        if self.gathering:
            self._gather(stage)
        if owner.gathers and len(given.batch.args) > 1:
            self.together.forward(stage, microbatch, arrived)
            return
        args, kwargs = given.batch.args[microbatch], given.batch.kwargs[microbatch]
        loss_of = self.loss_of(microbatch) if owner.is_last and not given.returns else None
        if not given.training:
            graph = loss_of is not None and given.loss_fn is None and given.shares.wants_graph
            emitted, loss, extra = owner.infer(microbatch, arrived, args, kwargs, loss_of, graph)
        else:
            emitted, loss, extra = owner.forward(
                microbatch,
                arrived,
                args,
                kwargs,
                split=(stage, microbatch) in self._split,
                recompute=microbatch in given.recompute or stage in given.recompute_stages,
                loss_of=loss_of,
            )
        self.deliver(stage, microbatch, emitted, loss, extra)

    def deliver(
        self,
        stage: int,
        microbatch: int,
        emitted: dict[int, Any],
        loss: Tensor | None,
        extra: Sequence[tuple[str, Tensor]],
    ) -> None:
        """What the forward of a microbatch has made goes where it is needed."""
        given = self.given
        if loss is not None:
            self.losses[microbatch] = loss.detach().clone()  # mse_loss gives a scalar in a storage of the output's size
        if extra and given.returns:
            raise RunError(
                f"add_loss({extra[0][0]!r}) under GPipe: it has no loss to add to; return the value as an output of "
                f"the model, and add it to your own loss"
            )
        for name, value in extra:
            self.report.extra[name] = self.report.extra.get(name, 0.0) + value.detach().item()
        if OUTPUT in emitted:
            output = emitted.pop(OUTPUT)
            if given.keep_outputs:
                output = output if self.crossing is None else self.crossing.whole(output)
                self._outputs[microbatch] = pytree.tree_map(alias, output) if given.returns else _detached(output)
                self._kept[microbatch] = versions(self._outputs[microbatch])
        if self.crossing is not None:
            emitted = {target: self.crossing.pack(payload) for target, payload in emitted.items()}
        self.mailbox.put_outputs(stage, microbatch, emitted)

    def _gather(self, stage: int) -> None:
        """Wait until the stage is whole, if that is under way."""
        wait = self.gathering.pop(stage, None)
        if wait is not None:
            wait()

    def loss_of(self, microbatch: int) -> LossOf | None:
        """None in an inference that has nothing to compare with. Without a loss_fn, a scalar output is the loss."""
        given = self.given
        if given.loss_fn is not None and not (given.training or given.batch.has_target):
            return None
        target, extra = given.batch.targets[microbatch], given.batch.loss_kwargs[microbatch]

        def loss_of(output: Any) -> Any:
            if given.loss_fn is None:
                loss = _scalar(output)
            elif given.shares.wants_graph and not given.training:
                loss = with_graph(given.loss_fn, output, target, extra)
            else:
                loss = given.loss_fn(output, target, **extra)
            if isinstance(loss, Tensor):
                given.shares.saw(microbatch, loss)
                if given.check is not None:
                    given.check.saw(microbatch, output, loss)
            return loss

        return loss_of

    def _backward(self, stage: int, microbatch: int) -> None:
        """B, or I where the program has an I of this microbatch."""
        split = (stage, microbatch) in self._split
        gradients = self._await(Op.I if split else Op.B, stage, microbatch)
        if self.crossing is not None:
            gradients = {target: self.crossing.unpack(payload) for target, payload in gradients.items()}
        if self.gathering:
            self._gather(stage)
        owner, seeds, seed = self.stages[stage], self._seeds or self._seeded(), None
        if owner.is_last and self.given.returns:
            gradients[OUTPUT] = self.given.output_gradients[microbatch]
        if 0 in owner.records and owner.records[0].whole:
            self.together.backward(stage, microbatch, gradients)
            return
        if owner.is_last and (loss := self.losses.get(microbatch)) is not None:
            seed = seeds.of(microbatch, loss)
        back = owner.backward(microbatch, gradients, split=split, loss_seed=seed, extra_seed=seeds.extra)
        if self.added is not None:
            self.added(stage)
        self.give_back(stage, microbatch, back)

    def give_back(self, stage: int, microbatch: int, back: Mapping[int, Any]) -> None:
        """The gradients of what a microbatch brought go back to where that came from."""
        if self.crossing is not None:
            back = {source: self.crossing.pack(payload) for source, payload in back.items()}
        self.mailbox.put_gradients(stage, microbatch, back)

    def _weight(self, stage: int, microbatch: int) -> None:
        if self.gathering:
            self._gather(stage)
        self.stages[stage].weights(microbatch)
        if self.added is not None:
            self.added(stage)

    def outputs(self) -> list[Any]:
        """The outputs that were kept, in the order of microbatches; forgets them."""
        found, self._outputs, self._kept = self._outputs, {}, {}
        return [found[number] for number in sorted(found)]

    def _check_outputs(self) -> None:
        """Outputs that were kept must be as they were when they were made."""
        for microbatch, watched in self._kept.items():
            check_unwritten(
                f"the output of microbatch {microbatch}", watched, "by a later one, since both are in the same memory"
            )

    def _sum_losses(self) -> None:
        """The batch's loss, for the report."""
        numbers = sorted(self.losses)
        if not numbers:
            return
        losses = torch.stack([self.losses[number] for number in numbers])
        shares = self.given.shares()
        self.given.shares.check()
        if self.given.check is not None:
            self.report.is_open = self.given.check.end()
        self.report.loss = sum_in_order(losses, [shares[number] for number in numbers])
        self.report.losses_by_number = losses.tolist()
        self.report.dtype = losses.dtype

    def forget_batch(self) -> None:
        """Hold nothing of what the step was given."""
        self.__dict__.pop("given", None)
        self._seeds = None

    def clear(self) -> None:
        """Forget everything about the step, so that the next one starts clean."""
        self.mailbox.clear()
        self._fetched.clear()
        self._outputs.clear()
        self._kept.clear()
        self.gathering.clear()
        self.together.clear()
        self.losses = {}
        self.report = StepReport()
        self.forget_batch()
        for stage in self.stages.values():
            stage.clear()


def _scalar(output: Any) -> Tensor | None:
    loss = own_loss(output)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, value)
