"""One stage's part of the work: forward, backward, weights, for one microbatch at a time.

Between its forward and its backward a microbatch is a `SavedGraph`: the leaves that arrived (whose
gradients go back), and the graph's roots by consumer. Roots are edges of the graph, not
tensors, so an output's memory is gone as soon as it has been sent, unless the graph itself
needs it. With recompute the graph is only what arrived, and the forward runs again, with the
same random numbers and on the same state, when the backward is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import has_accelerator
from penstock.errors import ModelError, RunError
from penstock.model.part import OUTPUT, StagePart
from penstock.runtime.backward.deferred_weights import DeferredWeights
from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode
from penstock.runtime.backward.saved_graph import FreshGradients, RunBackward, SavedGraph, ends_of_graph
from penstock.runtime.loss.module import StageAndLoss
from penstock.runtime.optim.precision import Precision
from penstock.runtime.state.batch_norm import Statistics, whole_norms
from penstock.runtime.state.ownership import GuardedPart, check_unwritten, versions
from penstock.runtime.state.phase import IN_TLS, NOW, Phase
from penstock.runtime.state.randomness import StageRandomness
from penstock.runtime.state.recomputation import RecomputedState
from penstock.runtime.transport.handover import alias

LossOf = Callable[[Any], Tensor | None]  # the output of the last stage -> its loss
Forward = tuple[dict[int, Any], Tensor | None, list[tuple[str, Tensor]]]  # payload by consumer, loss, extra losses


class StageInput(NamedTuple):
    """What one stage is run on, for one microbatch, and how."""

    microbatch: int
    arrived: Mapping[int, Any]  # by producing stage
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_of: LossOf | None
    split_backward: bool = False  # its backward comes as I and W
    recompute: bool = False  # its forward runs again when the backward is due

    def with_own_containers(self) -> StageInput:
        """Return the same tensors in containers of their own."""
        return self._mapped(lambda leaf: leaf)

    def aliased(self) -> StageInput:
        """Return the same values as other tensors, whose hooks and gradients are their own."""
        made: dict[int, Any] = {}  # a tensor that came twice stays one
        return self._mapped(lambda leaf: made.setdefault(id(leaf), alias(leaf)))

    def _mapped(self, of_leaf: Callable[[Any], Any]) -> StageInput:
        arrived, args, kwargs = pytree.tree_map(of_leaf, (dict(self.arrived), self.args, dict(self.kwargs)))
        return self._replace(arrived=arrived, args=args, kwargs=kwargs)


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


_NOTHING: AbstractContextManager[object] = nullcontext()


class Stage:
    """A part of the model on its rank. `randomness` wraps a compute in its random numbers."""

    attached = False  # whether its output goes back to the user's graph, and the output's gradient comes from there

    def __init__(
        self, part: StagePart, randomness: StageRandomness, *, is_last: bool, loss: nn.Module | None = None
    ) -> None:
        self.part = part
        self.module = part.module
        self.randomness = randomness
        self.is_last = is_last
        self.precision: Precision | None = None  # that of the step which runs
        self.guarded = GuardedPart(part, part.module)
        self.inspect_graph: Callable[[SavedGraph], None] | None = None  # at what a forward has recorded
        self.graphs_inspected = 0  # so far
        self.saved: dict[int, SavedGraph] = {}
        self.statistics = Statistics.of(part.module)  # of batch norms that the whole batch updates once
        self._whole_norms = whole_norms(part.module)
        self._waiting: dict[int, DeferredWeights] = {}  # between I and W
        self._parameters = DeferrableParameters()
        self.hold(loss)
        self._seeds: Sequence[int] = ()  # of the step's microbatches, where this rank has the generator to itself
        self.gathering = False  # `gathers`, in the step that runs
        self._has_run = False
        self._final = None if self.attached else OUTPUT  # the output that leaves the pipeline

    def hold(self, loss: nn.Module | None) -> None:
        """Take this loss beside the stage: what its forwards may read and write, and train, from here on."""
        self.holds = self.part.module if loss is None else StageAndLoss(self.part.module, loss)
        self._state = RecomputedState(self.part.index, self.holds)
        self.fresh = FreshGradients(self.holds)

    @property
    def gathers(self) -> bool:
        """Whether it takes its batch in one piece, for batch norms that normalise the whole of it."""
        return any(norm.gathers for norm in self._whole_norms)

    def carries(self, *kinds: type[Tensor]) -> None:
        """Tensors of these kinds are packed on their way to other stages."""
        self.guarded.outgoing.carried = kinds

    def begin_step(self, microbatches: int) -> None:
        """A program begins, on so many microbatches."""
        self._seeds = () if self.randomness.seeds is None else self.randomness.seeds(microbatches)
        self.fresh.begin_step()
        self.gathering = self.gathers

    def clear(self) -> None:
        """Forget all microbatches, as after a failed step."""
        self.saved.clear()
        self._waiting.clear()
        if self.statistics is not None:
            self.statistics.discard()

    # -- forward

    def infer(self, stage_input: StageInput, graph: bool = False) -> Forward:
        """A forward that keeps nothing; the loss has a graph only if that is asked for."""
        phase = Phase("forward", stage_input.microbatch, self.statistics)
        precise = _NOTHING if self.precision is None else self.precision()
        with torch.set_grad_enabled(graph), self._random_numbers(stage_input.microbatch) or _NOTHING, phase, precise:
            emitted = self.guarded.run(stage_input.arrived, stage_input.args, stage_input.kwargs, self._final)
            loss = None if stage_input.loss_of is None else stage_input.loss_of(emitted[OUTPUT])
        return emitted, loss, phase.extra

    def forward(self, stage_input: StageInput) -> Forward:
        """Run a microbatch forward and keep its graph for the backward."""
        if stage_input.microbatch in self.saved:
            raise RunError(
                f"stage {self.part.index} has run microbatch {stage_input.microbatch} forward already in this step"
            )
        self.saved[stage_input.microbatch] = graph = SavedGraph(stage_input.microbatch, stage_input.arrived)
        if stage_input.recompute:
            return self._run_for_recompute(graph, stage_input)
        if not self._state.in_use or not any(other.recompute for other in self.saved.values()):
            return self._run(graph, stage_input)
        before = self._state.before()  # what this forward changes, others that run again must not see
        results = self._run(graph, stage_input)
        self._state.after(before)
        return results

    def _run_for_recompute(self, graph: SavedGraph, stage_input: StageInput) -> Forward:
        """A forward that will run again: on the same tensors, in containers of its own, and on the same state."""
        # The graph is built, so that the outputs say truly whether they want a gradient, and the forward may take
        # gradients itself; it is dropped here. It needs no more memory than the next one, which has gradients beside
        # it. The very first also shows which weights can wait for W, so that the gradients of all microbatches are
        # added in W, in their order.
        learns = stage_input.split_backward and not self._parameters.known
        watched = versions((dict(stage_input.arrived), stage_input.args, dict(stage_input.kwargs)))
        before = self._state.before()
        # Hooks that the stage puts on what arrived must go with this forward: the next one puts them there again.
        first = stage_input.aliased()._replace(split_backward=learns)
        results = self._run(SavedGraph(graph.microbatch, first.arrived), first, "checkpointing")
        self._state.after(before)
        precision = self.precision

        # The graph is handed in: one that this function held would keep itself alive, and all that arrived with it.
        def again(graph: SavedGraph) -> None:
            self.precision = precision
            what = f"what stage {self.part.index} was given for microbatch {stage_input.microbatch}"
            check_unwritten(what, watched, "between its forward and its recomputation, by its maker or the user")
            with self._state.as_it_was(before):
                self._run(graph, stage_input.with_own_containers(), "recomputing")

        graph.recompute = again
        return results

    def _run(self, graph: SavedGraph, stage_input: StageInput, kind: str = "forward") -> Forward:
        numbers = self._random_numbers(stage_input.microbatch) or _NOTHING
        phase, recording, mode = Phase(kind, stage_input.microbatch, self.statistics), None, None
        if stage_input.split_backward:
            mode = DeferringMode(self._parameters)
            graph.deferred = mode.deferred
            recording = None if self._parameters.differentiates else mode
        loss: Tensor | None = None
        hooks = None if self._has_run else self._parameter_hooks()
        outer = NOW.own
        try:  # Ctrl-C may come at any line, and must not leave the phase behind. `with phase` costs two more calls.
            NOW.own = phase
            with numbers, _NOTHING if self.precision is None else self.precision():
                emitted = self.guarded.run(
                    stage_input.arrived, stage_input.args, stage_input.kwargs, self._final, recording
                )
                if stage_input.loss_of is not None:
                    with recording or _NOTHING:
                        loss = stage_input.loss_of(emitted[OUTPUT])
        finally:
            NOW.own = outer
        if hooks is not None:
            self._check_no_new(hooks)
        graph.end_forward(emitted, loss, phase.extra, self.attached)
        if mode is not None:
            if mode.candidates:
                mode.learn(ends_of_graph(emitted, loss, phase.extra, self.attached))
            elif not self._parameters.deferrable:
                self._parameters.has_none = True
        self._inspect_graph(graph, kind)
        return emitted, loss, phase.extra

    def _parameter_hooks(self) -> dict[str, int]:
        """Count the hooks of each parameter."""
        return {name: len(each._backward_hooks or ()) for name, each in self.module.named_parameters()}

    def _check_no_new(self, hooks: Mapping[str, int]) -> None:
        """Raise if the stage's first forward has registered hooks on its parameters."""
        self._has_run = True
        for name, count in self._parameter_hooks().items():
            if count > hooks.get(name, count):
                raise ModelError(
                    f"stage {self.part.index} registers a hook on its parameter {name} in its forward: microbatches "
                    f"share the parameter, so it would also fire for those that are under way; register it once, "
                    f"before training, or on a tensor that the forward makes"
                )

    def _random_numbers(self, microbatch: int) -> Any:
        """Those of one forward: seeded at once, or a context to enter, where ranks share the generator."""
        if self.randomness.own is not None:
            for generator in self.randomness.own.generators:
                generator.manual_seed(self._seeds[microbatch])
            return None
        return None if self.randomness.forward is None else self.randomness.forward(microbatch)

    def _inspect_graph(self, graph: SavedGraph, kind: str) -> None:
        """What a forward has recorded, before anything of it is dropped; for whoever wants to know."""
        if self.inspect_graph is not None:
            self.inspect_graph(graph)

    # -- backward

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[int, Sequence[Tensor | None]],
        *,
        split_backward: bool,
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
    ) -> dict[int, list[Tensor | None]]:
        """B or I: gradients by consumer in, gradients by producer out (None where there is none)."""
        graph = self.saved.pop(microbatch, None)
        if graph is None:
            raise RunError(
                f"stage {self.part.index} cannot run the backward of microbatch {microbatch}: its forward has not run"
            )
        if graph.recompute is not None:
            graph.recompute(graph)
        if split_backward and graph.deferred is not None:
            graph.deferred.begin_input()
            self._waiting[microbatch] = graph.deferred
        numbers = None if self.randomness.backward is None else self.randomness.backward(microbatch)
        outer = NOW.own
        try:
            enter_backward(Phase("backward", microbatch, self.statistics))
            with numbers or _NOTHING:
                return graph.backward(gradients, loss_seed, extra_seed, self._runs_backward())
        finally:
            enter_backward(outer)

    def _runs_backward(self) -> RunBackward:
        """How autograd is run: gradients of parameters are added to their `.grad`."""
        return self.fresh.run_backward

    def weight_gradients(self, microbatch: int) -> None:
        """W: the weight gradients that were put off."""
        deferred = self._waiting.pop(microbatch, None)
        if deferred is None:
            raise RunError(f"stage {self.part.index} has no postponed weight gradient of microbatch {microbatch}")
        self.fresh.run(deferred.run)


def enter_backward(phase: Phase | None) -> None:
    """Set this thread's compute, for the threads of autograd's that run its backward too."""
    if has_accelerator():  # Otherwise a backward runs on this thread.
        torch._C._stash_obj_in_tls(IN_TLS, phase)
    NOW.own = phase
