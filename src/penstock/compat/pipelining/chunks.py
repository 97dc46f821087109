"""What torch's custom functions call: a stage's computes by microbatch, and a schedule's receives.

With torch, a function for an action does by hand all that the action needs: it waits for the receive, runs the stage,
computes the loss, hands values to a stage on the same rank. Here a compute does all of these. So the calls that begin
something become that compute, and the others have nothing left to do. They check that they are given what the compute
made or used: a function that puts something else in its place would be overruled in silence.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from torch import Tensor, nn

from penstock.errors import RunError, UsageError
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op

BACKWARDS = (Op.B, Op.I)


class Running:
    """The action that a custom function is doing."""

    def __init__(self, action: Action, context: Context) -> None:
        self.action = action
        self.context = context
        self.outputs: dict[tuple[int, int], Any] = {}  # Indexed by stage and microbatch.
        self._here, self._lock = False, Lock()

    def fetch(self) -> None:
        """Wait for all that the action needs. Halves on two threads must not wait at once, nor beside a compute."""
        with self._lock:
            if not self._here:
                self.context.fetch(self.action)
                self._here = True

    wait = fetch  # It stands in the place of torch's work handles.

    def part(self, ops: Sequence[Op], stage: int, microbatch: int) -> Action:
        """Return the half of the action, or all of it, that does this."""
        for part in self.action.parts():
            if part.op in ops and (part.stage, part.microbatch) == (stage, microbatch):
                return part
        raise UsageError(f"a custom function for {self.action} ran {stage}{ops[0]}{microbatch}, which is no part of it")

    def compute(self, part: Action) -> None:
        """Run it; what it needs is waited for."""
        self.fetch()
        self.context.compute(part)

    def made(self, value: Any, stage: int, microbatch: int) -> None:
        """Check that this is the output of a forward that ran here."""
        if self.outputs.get((stage, microbatch)) is not value:
            raise UsageError(
                f"a custom function passed on something else than what {stage}F{microbatch} returned; the value is "
                f"sent, and goes into the loss, as the stage's forward returned it: change it there"
            )


class ByChunk:
    """The methods of a torch stage that compute one microbatch, for custom functions."""

    stage_index: int
    submod: nn.Module
    running: Running | None = None

    @property
    def _now(self) -> Running:
        if self.running is None:
            raise UsageError(f"stage {self.stage_index} runs by itself only inside of a custom function; call step()")
        return self.running

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a microbatch, and its loss on the last stage."""
        batch = self._now.context.batch
        given, named = batch.args[fwd_chunk_id], batch.kwargs[fwd_chunk_id]
        same = self.stage_index > 0 or (len(args) == len(given) and all(map(operator.is_, args, given)))
        if not same or (kwargs or {}).keys() != named.keys() or not all(kwargs[key] is named[key] for key in named):  # type: ignore[index]
            raise UsageError(
                f"forward_one_chunk({fwd_chunk_id}) was given other arguments than the step has for that microbatch; "
                f"pass ctx.arg_mbs[{fwd_chunk_id}] and ctx.kwarg_mbs[{fwd_chunk_id}]"
            )
        outputs: list[Any] = []
        handle = self.submod.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            self._now.compute(self._now.part((Op.F,), self.stage_index, fwd_chunk_id))
        finally:
            handle.remove()
        self._now.outputs[self.stage_index, fwd_chunk_id] = outputs[0] if outputs else None
        return outputs[0] if outputs else None

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a microbatch: all of it, or that for the inputs."""
        part = self._now.part(BACKWARDS, self.stage_index, bwd_chunk_id)
        if full_backward != (part.op is Op.B):
            raise UsageError(f"backward_one_chunk(full_backward={full_backward}), but the order has {part}")
        if loss is not None and loss is not self._now.context.losses.get(bwd_chunk_id):
            raise UsageError(
                f"the backward of microbatch {bwd_chunk_id} begins with the loss that its forward computed, not with "
                f"the one that was passed; change loss_fn"
            )
        self._now.compute(part)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a backward that was for the inputs."""
        self._now.compute(self._now.part((Op.W,), self.stage_index, bwd_chunk_id))

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Check the value: a stage on the same rank finds it by itself."""
        self._now.made(prev_stage_outputs, self.stage_index - 1, mb_index)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Any, ...]:
        """Return nothing: a stage on the same rank finds the gradients."""
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Any, ...], mb_index: int) -> None:
        """Refuse anything but what `get_local_bwd_output` gave: gradients are found without it."""
        if next_stage_bwd_outputs != ():
            raise UsageError("a stage on the same rank finds the gradients by itself; others cannot be set")

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Leave gradients alone: losses are scaled, once."""


class CustomFunctions:
    """The methods and tables of a torch schedule that custom functions use."""

    _all_stages: list[Any]

    def __init__(self) -> None:
        self.fwd_recv_ops, self.bwd_recv_ops = Receives(self, (Op.F,)), Receives(self, BACKWARDS)
        self.backward_counter: Counter[int] = Counter()  # Functions count in it; every step resets it.

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Check the output: the last stage's forward has computed the loss."""
        stage._now.made(output, stage.stage_index, mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        """Return the loss that the forward of this microbatch computed; None where this stage computes none."""
        losses: Mapping[int, Tensor] = stage._now.context.losses
        if not stage.is_last or not losses:
            return None
        if mb_index not in losses:
            raise RunError(
                f"Loss for microbatch {mb_index} is not available. Available losses for microbatches: {sorted(losses)}"
            )
        return losses[mb_index]

    def _assert_unsharded(self, stage: Any) -> None:
        """Leave it: a compute waits until its stage is whole."""


class Receives:
    """torch's table of receives under way, by (stage, microbatch): what is taken out can be waited for."""

    def __init__(self, schedule: CustomFunctions, ops: Sequence[Op]) -> None:
        self._schedule, self._ops = schedule, ops

    def __contains__(self, key: tuple[int, int]) -> bool:
        return True

    def pop(self, key: tuple[int, int]) -> list[Running]:
        running: Running = self._schedule._all_stages[0]._now
        running.part(self._ops, *key)
        return [running]


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    for each in work:
        each.wait()
