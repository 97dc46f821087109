"""The computations of one rank, F, B, I and W, each by itself; and where they find what they need.

Each takes what it needs from the mailbox, runs the stage, and puts what the stage made back into the mailbox. In which
order they run, and when messages leave, is decided by the executor.

A stage never knows whether its neighbour is on another rank: values from other ranks are taken off their channel,
values from this rank were put into the box, detached and without a copy. The turn of a V is therefore an ordinary
hand-over. All routes are worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PeerFailure, RunError
from penstock.model.part import OUTPUT
from penstock.runtime.batch.outputs import KeptOutputs
from penstock.runtime.engine.gathered_batch import GatheredBatch
from penstock.runtime.engine.recorder import ActionWait
from penstock.runtime.engine.report import StepReport
from penstock.runtime.engine.stage import Stage, StageHooks, StageInput
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.loss.losses import StepLosses, fetch, sum_in_order
from penstock.runtime.transport import Transport
from penstock.runtime.transport.channel import ChannelEnds, channels_of
from penstock.runtime.transport.handover import Rewritten, arrive, share
from penstock.runtime.transport.interrupts import CTRL_C, DUE
from penstock.schedule import Link, Placement, Topology
from penstock.schedule.action import Action, Op


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
        self.outputs = KeptOutputs()
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
                self.outputs.keep(microbatch, output, step_input.attached)
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

    def end_step(self) -> None:
        """Join what the actions have made: inside of the step, so that what does not fit fails it on every rank."""
        if self.step_input.join is not None:
            self.outputs.join(self.step_input.join)
        self.sum_losses()

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
        self._gathered.clear()
        self.losses, self._extra = {}, []
        self.report = StepReport()
        self.forget_batch()
        self.free()

    def free(self) -> None:
        """Let go of what a failed step has received and computed: the memory may be needed to receive what follows."""
        self.mailbox.free()
        self.outputs = KeptOutputs()
        for stage in self.stages.values():
            stage.clear()


# -- where values wait


class _Route(NamedTuple):
    """One neighbour of a stage: how its value comes, or goes."""

    other: int  # the stage at the other end
    channel: Any  # a number, or None: it lives on this rank
    exclusive: bool  # a message of its own, for nobody else


class Mailbox:
    """Values between the stages of one rank and their neighbours, here or on other ranks."""

    def __init__(self, rank: int, placement: Placement, topology: Topology, transport: Transport) -> None:
        self._transport = transport
        self.channels, self._numbers, crossing = channels_of(placement, topology)
        self.ends = ChannelEnds()
        self._values: dict[tuple[str, int, int, int], Any] = {}  # direction, to, from, microbatch
        self.fetched: dict[tuple[str, int, int], dict[int, Any]] = {}  # taken before its computation: direction, stage
        self.waits: ActionWait | None = None  # where the step is recorded
        self.waited_for: tuple[str, int] | None = None  # the receive that brought a failure, and from which rank
        self._arriving: dict[tuple[str, int], list[_Route]] = {}  # by direction and stage
        self._leaving: dict[tuple[str, int], list[_Route]] = {}
        for stage in placement.stages_of(rank):
            producers = [self._route(crossing, source, stage, source) for source in topology.producers(stage)]
            consumers = [self._route(crossing, stage, target, target) for target in topology.consumers(stage)]
            self._arriving["F", stage], self._leaving["F", stage] = producers, consumers
            self._arriving["B", stage] = [*map(_back, consumers)]
            self._leaving["B", stage] = [*map(_back, producers)]

    def _route(self, crossing: tuple[Link, ...], source: int, target: int, other: int) -> _Route:
        for link in crossing:
            if link.source == source and target in link.targets:
                return _Route(other, self._numbers[link.source, link.target, "F"], len(link.targets) == 1)
        return _Route(other, None, False)

    def channel(self, action: Action) -> int:
        """The channel of a transfer action."""
        near, far = action.stage, action.other_end
        sends = action.op in (Op.SEND_F, Op.SEND_B)
        direction = "F" if action.op in (Op.SEND_F, Op.RECV_F) else "B"
        return self._numbers[(near, far, direction) if sends else (far, near, direction)]

    def open(self) -> bool:
        """Have the transport serve this pipeline's channels; whether `ends` has others than before."""
        before = self.ends
        self._transport.open(self.channels)
        self.ends = self._transport.ends
        return self.ends is not before

    def clear(self) -> None:
        """Drop everything, as after a failed step."""
        self.free()
        for end in self.ends.outgoing.values():
            end.ready.clear()
        self.waited_for = None

    def free(self) -> None:
        """Let go of what has come."""
        self._values.clear()
        self.fetched.clear()

    # -- in

    def fetch(self, direction: str, stage: int, microbatch: int) -> None:
        """Wait for what a computation needs, and keep it for that computation."""
        if (direction, stage, microbatch) not in self.fetched and (found := self.take(direction, stage, microbatch)):
            self.fetched[direction, stage, microbatch] = found

    def take(self, direction: str, stage: int, microbatch: int) -> dict[int, Any]:
        """By neighbour, the payload ("F") or the gradients ("B") for a stage; waits where it is still on its way."""
        if self.fetched and (direction, stage, microbatch) in self.fetched:
            return self.fetched.pop((direction, stage, microbatch))
        begin = 0.0 if self.waits is None else perf_counter()
        found: dict[int, Any] = {}
        for other, channel, exclusive in self._arriving[direction, stage]:
            try:
                if exclusive:  # as in any chain of stages
                    found[other] = self.ends.incoming[channel].receive(microbatch)
                elif channel is not None:
                    found[other] = self._take_shared(direction, stage, other, channel, microbatch)
                else:
                    found[other] = self._pop(direction, stage, other, microbatch)
                    if direction == "F":
                        value, ready = found[other]
                        found[other] = arrive(value, ready, None)
            except PeerFailure:
                edge = self.channels[channel]
                self.waited_for = edge.receive_action(microbatch), edge.source_rank
                raise
            except Rewritten:
                source = other if channel is None else self.channels[channel].source_stage
                raise Rewritten(source, microbatch) from None
            if CTRL_C.state is DUE:
                CTRL_C.raise_due()
        if self.waits is not None:
            self.waits.add(begin, perf_counter())
        return found

    def _take_shared(self, direction: str, stage: int, other: int, channel: int, microbatch: int) -> Any:
        """Out of a message that is for, or from, several stages of a rank; the first that asks receives it."""
        if (direction, stage, other, microbatch) not in self._values:
            for reader, payload in self.ends.incoming[channel].receive(microbatch).items():
                to, source = (reader, other) if direction == "F" else (stage, reader)
                self._values[direction, to, source, microbatch] = payload
        return self._pop(direction, stage, other, microbatch)

    def _pop(self, direction: str, to: int, source: int, microbatch: int) -> Any:
        try:
            return self._values.pop((direction, to, source, microbatch))
        except KeyError:
            what = "output" if direction == "F" else "gradient"
            raise RunError(
                f"stage {to} needs the {what} of stage {source} for microbatch {microbatch}, which is not there"
            ) from None

    # -- out

    def put_outputs(self, stage: int, microbatch: int, emitted: Mapping[int, Any]) -> None:
        """Hand over what stays on this rank; put up the rest for its SEND."""
        for route in self._leaving["F", stage]:
            payload = emitted[route.other]
            if route.channel is None:
                self._values["F", route.other, stage, microbatch] = share(payload)
            else:
                self._put_up(route, route.other, microbatch, payload)

    def put_gradients(self, stage: int, microbatch: int, back: Mapping[int, Any]) -> None:
        """Give each producing stage the gradients of what it sent."""
        for route in self._leaving["B", stage]:
            if route.channel is None:
                self._values["B", route.other, stage, microbatch] = back[route.other]
            else:
                self._put_up(route, stage, microbatch, back[route.other])

    def _put_up(self, route: _Route, reader: int, microbatch: int, payload: Any) -> None:
        ready = self.ends.outgoing[route.channel].ready
        if route.exclusive:
            ready[microbatch] = payload
        else:
            ready.setdefault(microbatch, {})[reader] = payload


def _back(route: _Route) -> _Route:
    """The same way for gradients: the way back always has the next number."""
    return route._replace(channel=None if route.channel is None else route.channel + 1)
