"""The computations of one rank: F, B, I and W, each by itself.

Each takes what it needs from the mailbox, runs the stage, and puts what the stage made back into the mailbox. In which
order they run, and when messages leave, is decided by the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import RunError
from penstock.model.part import OUTPUT
from penstock.runtime.engine.gathered_batch import GatheredBatch
from penstock.runtime.engine.mailbox import Mailbox
from penstock.runtime.engine.report import StepReport
from penstock.runtime.engine.stage import Stage, StageInput
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.loss.losses import StepLosses, fetch, sum_in_order
from penstock.runtime.state.ownership import Watched, check_unwritten, versions
from penstock.runtime.transport.handover import alias


class StageHooks(Protocol):
    """What stages need around each computation where their parameters are sharded or their tensors are spread."""

    def before(self, stage: int) -> None:
        """The stage is about to compute: wait until its parameters are complete."""

    def after(self, stage: int) -> None:
        """The stage has new gradients."""

    def pack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Values that leave a stage, by the stage they are for, in a form that may travel."""

    def unpack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Values that have arrived, as the stage emitted them."""

    def full(self, value: Any) -> Any:
        """An output as the user gets to see it."""


class Computations:
    """The stages and the mailbox of one rank, and the step that they work on."""

    def __init__(self, stages: Mapping[int, Stage], mailbox: Mailbox) -> None:
        self.stages = dict(stages)
        self.mailbox = mailbox
        self.hooks: StageHooks | None = None
        self.step_input: StepInput
        self.step_losses: StepLosses
        self.report = StepReport()
        self.losses: dict[int, Tensor] = {}  # by microbatch, on the rank of the last stage
        self._extra: list[tuple[str, Tensor]] = []  # losses from inside stages, by name
        self.split_backward: frozenset[tuple[int, int]] = frozenset()  # (stage, microbatch): comes as I and W
        self._outputs: dict[int, Any] = {}
        self._kept: dict[int, Watched] = {}  # the tensors of these outputs
        self._joined: Any = None  # one of all of them
        self._gathered = GatheredBatch(self)

    def begin(self, step_input: StepInput) -> None:
        """A step begins, on this input."""
        self.step_input = step_input
        self.step_losses = StepLosses(
            step_input.batch,
            step_input.loss_fn,
            step_input.shares,
            step_input.begin_check,
            step_input.training,
            step_input.scale,
            step_input.replicas,
        )
        self.report.steps = step_input.steps
        self.report.rows = None if step_input.batch.rows is None else sum(step_input.batch.rows)
        for stage in self.stages.values():
            stage.begin_step(len(step_input.batch.args))

    def forward(self, stage: int, microbatch: int) -> None:
        """F: run a stage's forward on one microbatch and hand its outputs to the mailbox."""
        step_input, owner = self.step_input, self.stages[stage]
        arrived = self.mailbox.take("F", stage, microbatch)
        if self.hooks is not None:
            arrived = self.hooks.unpack(arrived)
            self.hooks.before(stage)
        if owner.gathering and len(step_input.batch.args) > 1:
            self._gathered.forward(stage, microbatch, arrived)
            return
        args, kwargs = step_input.batch.args[microbatch], step_input.batch.kwargs[microbatch]
        loss_of = None
        if owner.is_last and not step_input.attached and self.step_losses.are_wanted:
            loss_of = partial(self.step_losses.of, microbatch)
        if not step_input.training:
            graph = loss_of is not None and step_input.loss_fn is None and step_input.shares.wants_graph
            emitted, loss, extra = owner.infer(StageInput(microbatch, arrived, args, kwargs, loss_of), graph)
        else:
            split_backward = (stage, microbatch) in self.split_backward
            recompute = microbatch in step_input.recompute or stage in step_input.recompute_stages
            emitted, loss, extra = owner.forward(
                StageInput(microbatch, arrived, args, kwargs, loss_of, split_backward, recompute)
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
        step_input = self.step_input
        if loss is not None:
            self.losses[microbatch] = loss.detach().clone()  # mse_loss gives a scalar in a storage of the output's size
        if extra and step_input.attached:
            raise RunError(
                f"add_loss({extra[0][0]!r}) under GPipe: it has no loss to add to; return the value as an output of "
                f"the model, and add it to your own loss"
            )
        for name, value in extra:
            self._extra.append((name, value.detach().clone()))
        if OUTPUT in emitted:
            output = emitted.pop(OUTPUT)
            if step_input.join is not None:
                output = output if self.hooks is None else self.hooks.full(output)
                if step_input.reduce is not None:
                    with torch.no_grad():
                        output = step_input.reduce(output, **step_input.batch.loss_kwargs[microbatch])
                self._outputs[microbatch] = pytree.tree_map(alias, output) if step_input.attached else _detached(output)
                self._kept[microbatch] = versions(self._outputs[microbatch])
        if emitted:
            self.mailbox.put_outputs(stage, microbatch, emitted if self.hooks is None else self.hooks.pack(emitted))

    def backward(self, stage: int, microbatch: int) -> None:
        """B: run a stage's backward on one microbatch; or I, where the program has an I of this microbatch."""
        owner = self.stages[stage]
        gradients = {} if owner.is_last else self.mailbox.take("B", stage, microbatch)
        if self.hooks is not None:
            gradients = self.hooks.unpack(gradients)
            self.hooks.before(stage)
        seeds, seed = self.step_losses.seeds, None
        if owner.is_last and self.step_input.attached:
            gradients[OUTPUT] = self.step_input.output_gradients[microbatch]
        if 0 in owner.saved and owner.saved[0].gathered is not None:
            self._gathered.backward(stage, microbatch, gradients)
            return
        if owner.is_last and (loss := self.losses.get(microbatch)) is not None:
            made = seeds.made.get((loss.dtype, loss.device))
            seed = seeds.of(microbatch, loss) if made is None else made[microbatch]
        back = owner.backward(
            microbatch,
            gradients,
            split_backward=(stage, microbatch) in self.split_backward,
            loss_seed=seed,
            extra_seed=seeds.extra,
        )
        if self.hooks is not None:
            self.hooks.after(stage)
        self.send_gradients_back(stage, microbatch, back)

    def send_gradients_back(self, stage: int, microbatch: int, back: Mapping[int, Any]) -> None:
        """The gradients of what a microbatch brought go back to where that came from."""
        if back:
            self.mailbox.put_gradients(stage, microbatch, back if self.hooks is None else self.hooks.pack(back))

    def weight_gradients(self, stage: int, microbatch: int) -> None:
        """W: compute the weight gradients that I deferred."""
        if self.hooks is not None:
            self.hooks.before(stage)
        self.stages[stage].weight_gradients(microbatch)
        if self.hooks is not None:
            self.hooks.after(stage)

    def output(self) -> Any:
        """What became of the outputs that were kept, if any; forgets it."""
        found, self._joined = self._joined, None
        return found

    def end_step(self) -> None:
        """All actions are done: what they have made together."""
        self.join_outputs()
        self.sum_losses()

    def join_outputs(self) -> None:
        """Inside of the step, so that outputs which do not fit together fail it on every rank.

        Outputs that were kept must be as they were when they were made.
        """
        for microbatch, watched in self._kept.items():
            check_unwritten(
                f"the output of microbatch {microbatch}", watched, "by a later one, since both are in the same memory"
            )
        if self._outputs and self.step_input.join is not None:
            self._joined = self.step_input.join([self._outputs[number] for number in sorted(self._outputs)])
        self._outputs, self._kept = {}, {}

    def sum_losses(self) -> None:
        """Compute the batch's loss, for the report, from numbers that come from the device with one copy."""
        shares, check, order = self.step_input.shares, self.step_losses.check, sorted(self.losses)
        asked = [*self.losses.values(), *(value for _, value in self._extra)]
        if order:  # where ranks are threads, the last stage's adds to what is read of losses
            asked += [*shares.tensors, *(() if check is None else check.tensors)]
        numbers = fetch(asked)
        for name, value in self._extra:
            self.report.extra[name] = self.report.extra.get(name, 0.0) + numbers[id(value)]
        self._extra = []
        if not order:
            return
        losses = {number: numbers[id(self.losses[number])] for number in order}
        if check is not None:
            check.judge(numbers, losses)
        counts = shares.check(numbers)
        self.report.counts = list(shares.for_replicas)
        if check is not None:
            check.passed()
        self.report.dtype = self.losses[order[0]].dtype
        self.report.losses_by_number = list(losses.values())
        values = torch.tensor(self.report.losses_by_number, dtype=self.report.dtype, device="cpu")
        self.report.loss = sum_in_order(values, [counts[number] for number in order])

    def forget_batch(self) -> None:
        """Hold nothing of what the step was given."""
        self.__dict__.pop("step_input", None)
        self.__dict__.pop("step_losses", None)

    def clear(self) -> None:
        """Forget everything about the step, so that the next one starts clean."""
        self.mailbox.clear()
        self._joined = None
        self._gathered.clear()
        self.losses, self._extra = {}, []
        self.report = StepReport()
        self.forget_batch()
        self.free()

    def free(self) -> None:
        """Let go of what a failed step has received and computed: the memory may be needed to receive what follows."""
        self.mailbox.free()
        self._outputs.clear()
        self._kept.clear()
        for stage in self.stages.values():
            stage.clear()


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, value)
