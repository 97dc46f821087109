"""One stage's part of the work: forward, backward, weights, for one microbatch at a time.

Between its forward and its backward a microbatch is a `GraphRecord`: the leaves that arrived (whose
gradients go back), and the graph's roots by consumer. Roots are edges of the graph, not
tensors, so an output's memory is gone as soon as it has been sent, unless the graph itself
needs it. With recompute the record is only what arrived, and the forward runs again, with the
same random numbers and on the same state, when the backward is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, RunError
from penstock.model.part import OUTPUT, StagePart
from penstock.optim.precision import Precision
from penstock.runtime.backward.record import GraphRecord, edge_of, tensors_with_gradient
from penstock.runtime.backward.split import DeferredWeights, StageParameters
from penstock.runtime.loss.losses import ExtraLosses, check_loss
from penstock.runtime.loss.module import StageAndLoss
from penstock.runtime.state.attributes import Attributes
from penstock.runtime.state.batch_norm import Statistics, whole_norms
from penstock.runtime.state.buffers import Buffers
from penstock.runtime.state.ownership import (
    FreshGradients,
    OutgoingValues,
    Received,
    Watched,
    check_unwritten,
    fit_gradients,
    versions,
)
from penstock.runtime.state.phase import Phase

__all__ = ["GraphRecord", "LossOf", "Stage", "tensors_with_gradient"]

LossOf = Callable[[Any], Any]  # the output of the last stage -> its loss
Forward = tuple[dict[int, Any], Tensor | None, list[tuple[str, Tensor]]]  # payload by consumer, loss, extra losses
Run = Callable[[Mapping[int, Any], tuple[Any, ...], Mapping[str, Any]], dict[int, Any]]
Turn = Callable[[str, int], AbstractContextManager[None] | None]  # (F or B, microbatch); None: nothing to enter

_NOTHING = nullcontext()
_ENGINE = torch.autograd.Variable._execution_engine


class Stage:
    """A part of the model on its rank. `turn` wraps a compute in its random numbers."""

    returns = False  # whether its output goes back to the user's graph, and the output's gradient comes from there

    def __init__(self, part: StagePart, turn: Turn, *, is_last: bool, loss: nn.Module | None = None) -> None:
        self.part = part
        self.module = part.module
        self.holds = part.module if loss is None else StageAndLoss(part.module, loss)
        self.turn = turn
        self.is_last = is_last
        self.precision: Precision | None = None  # that of the step which runs
        self.wrap: Callable[[Run], Run] | None = None  # around the part's own computing
        self.others_take: Sequence[frozenset[str] | None] = ()  # the keyword arguments of other stages
        self.look: Callable[[GraphRecord], None] | None = None  # at what a forward has recorded
        self.looks = 0  # so far
        self.records: dict[int, GraphRecord] = {}
        self.statistics = Statistics.of(part.module)  # of batch norms that the whole batch updates once
        self._whole_norms = whole_norms(part.module)
        self._waiting: dict[int, DeferredWeights] = {}  # between I and W
        self._parameters = StageParameters()
        self._buffers = Buffers(part.index, self.holds)
        self._attributes = Attributes(part.index, self.holds)
        self._outgoing = OutgoingValues(part.index, self.holds)
        self._received = Received(part.index)
        self._entered = Received(part.index, "the model's input")
        self.fresh = FreshGradients(self.holds)

    @property
    def gathers(self) -> bool:
        """Whether it takes its batch in one piece, for batch norms that normalise the whole of it."""
        return any(norm.gathers for norm in self._whole_norms)

    def carries(self, *kinds: type[Tensor]) -> None:
        """Tensors of these kinds are packed on their way to other stages."""
        self._outgoing.carried = kinds

    def begin_step(self) -> None:
        """A program begins."""
        self.fresh.begin_step()

    def clear(self) -> None:
        """Forget all microbatches, as after a failed step."""
        self.records.clear()
        self._waiting.clear()
        if self.statistics is not None:
            self.statistics.discard()

    # -- forward

    def infer(
        self,
        microbatch: int,
        arrived: Mapping[int, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_of: LossOf | None,
        graph: bool = False,
    ) -> Forward:
        """A forward that keeps nothing; the loss has a graph only if that is asked for."""
        phase = Phase("forward", microbatch, self.statistics)
        with torch.set_grad_enabled(graph), self.turn("F", microbatch) or _NOTHING, ExtraLosses() as extra, phase:
            emitted, loss = self._compute(arrived, args, kwargs, loss_of)
        return emitted, loss, extra.found

    def forward(
        self,
        microbatch: int,
        arrived: Mapping[int, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        split: bool,
        recompute: bool,
        loss_of: LossOf | None,
    ) -> Forward:
        """Leaves a record for the backward."""
        if microbatch in self.records:
            raise RunError(f"stage {self.part.index} has run microbatch {microbatch} forward already in this step")
        record = GraphRecord({stage: tensors_with_gradient(payload) for stage, payload in arrived.items()})
        self.records[microbatch] = record
        if recompute:
            return self._run_to_forget(record, microbatch, arrived, args, kwargs, split, loss_of)
        if not self._attributes.in_use or not any(other.again for other in self.records.values()):
            return self._run(record, microbatch, arrived, args, kwargs, split, loss_of)
        attributes = self._attributes.before()  # what this forward changes, others that run again must not see
        results = self._run(record, microbatch, arrived, args, kwargs, split, loss_of)
        self._attributes.after(attributes)
        return results

    def _run_to_forget(
        self,
        record: GraphRecord,
        microbatch: int,
        arrived: Mapping[int, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        split: bool,
        loss_of: LossOf | None,
    ) -> Forward:
        """A forward that will run again: on the same tensors, in containers of its own, and on the same state."""
        # the graph is built, so that the outputs say truly whether they want a gradient, but it
        # saves nothing and is dropped here; the very first also shows which weights can wait for W,
        # so that the gradients of all microbatches are added in W, in their order
        learns = split and not self._parameters.known
        buffers, watched = self._buffers.before(), versions((dict(arrived), args, dict(kwargs)))
        attributes = self._attributes.before()
        with nullcontext() if learns else saved_tensors_hooks(_save_nothing, _never_unpack):
            own, own_args, own_kwargs = _afresh((dict(arrived), args, dict(kwargs)))
            results = self._run(record, microbatch, own, own_args, own_kwargs, learns, loss_of, "checkpointing")
        self._buffers.after(buffers)
        self._attributes.after(attributes)
        record.roots, record.loss, record.extra, record.deferred = {}, None, [], None
        precision = self.precision

        def again() -> None:
            self.precision = precision
            what = f"what stage {self.part.index} was given for microbatch {microbatch}"
            check_unwritten(what, watched, "between its forward and its recomputation, by its maker or the user")
            with self._buffers.as_they_were(buffers), self._attributes.as_they_were(attributes):
                own, own_args, own_kwargs = _afresh((dict(arrived), args, dict(kwargs)))
                self._run(record, microbatch, own, own_args, own_kwargs, split, loss_of, "recomputing")

        record.again = again
        return results

    def _run(
        self,
        record: GraphRecord,
        microbatch: int,
        arrived: Mapping[int, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        split: bool,
        loss_of: LossOf | None,
        kind: str = "forward",
    ) -> Forward:
        turn = self.turn("F", microbatch)
        with ExtraLosses() as extra, Phase(kind, microbatch, self.statistics):
            if turn is None and not split:  # the plain way, without managers that do nothing
                emitted, loss = self._compute(arrived, args, kwargs, loss_of)
            else:
                recording: AbstractContextManager[object] = _NOTHING
                if split:
                    record.deferred = DeferredWeights(self._parameters)
                    recording = record.deferred.recording()
                with turn or _NOTHING, recording:
                    emitted, loss = self._compute(arrived, args, kwargs, loss_of)
        ends: list[Tensor] = []
        for target, payload in emitted.items():
            if target != OUTPUT or self.returns:
                found = tensors_with_gradient(payload)
                record.roots[target] = [edge_of(tensor) for tensor in found]
                ends += found
        if loss is not None and loss.requires_grad:
            record.loss = edge_of(loss)
        if extra.found:
            record.extra = [edge_of(value) for _, value in extra.found if value.requires_grad]
        if record.deferred is not None:
            ends += [value for value in (loss, *(value for _, value in extra.found)) if value is not None]
            record.deferred.learn(ends)
        self._look_at_graph(record, kind)
        return emitted, loss, extra.found

    def _look_at_graph(self, record: GraphRecord, kind: str) -> None:
        """What a forward has recorded, before anything of it is dropped; for whoever wants to know."""
        if self.look is not None:
            self.look(record)

    def _compute(
        self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_of: LossOf | None
    ) -> tuple[dict[int, Any], Tensor | None]:
        if self.precision is None:
            emitted = self._call(arrived, args, kwargs)
            loss = None if loss_of is None else loss_of(emitted[OUTPUT])
        else:
            with self.precision():
                emitted = self._call(arrived, args, kwargs)
                loss = None if loss_of is None else loss_of(emitted[OUTPUT])
        return emitted, None if loss is None else check_loss(loss)

    def _call(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Run the part on what it may write to, and see to it that what it emits may leave."""
        run = self.part.run if self.wrap is None else self.wrap(self.part.run)
        received: Watched = []
        entered: Watched = []
        if arrived:
            arrived, received = self._received.hand(arrived)
        if not arrived or kwargs or self.part.whole_batch:
            (args, kwargs), entered = self._entered.hand((args, kwargs))
        try:
            emitted = run(arrived, args, kwargs)
        except RuntimeError as error:
            if arrived and "a leaf Variable that requires grad" in str(error):
                raise ModelError(self._received.late()) from error
            raise
        if received:
            self._received.learn(received)
        if entered and (written := self._entered.learn(entered)):
            self._check_alone(kwargs, written)
        self._outgoing.fit(emitted, None if self.returns else OUTPUT)
        return emitted

    def _check_alone(self, kwargs: Mapping[str, Any], written: Sequence[Tensor]) -> None:
        """In a plain loop, what a stage writes into a keyword argument is seen by the stages behind it."""
        shared = [name for name in kwargs if any(takes is None or name in takes for takes in self.others_take)]
        for name in shared:
            if any(leaf is tensor for leaf in pytree.tree_leaves(kwargs[name]) for tensor in written):
                raise ModelError(
                    f"stage {self.part.index} writes in place into the keyword argument {name!r}, which another stage "
                    f"takes too and would get as it was; clone() it before it is written to, or pass it on as an output"
                )

    # -- backward

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[int, Sequence[Tensor | None]],
        *,
        split: bool,
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
    ) -> dict[int, list[Tensor | None]]:
        """B or I: gradients by consumer in, gradients by producer out (None where there is none)."""
        record = self.records.pop(microbatch, None)
        if record is None:
            raise RunError(f"stage {self.part.index} has no forward of microbatch {microbatch} to go back through")
        if record.again is not None:
            record.again()
        roots, seeds = self._seeds(record, microbatch, gradients, loss_seed, extra_seed)
        if split and record.deferred is not None:
            record.deferred.begin_input()
            self._waiting[microbatch] = record.deferred
        record.begin_backward()
        if roots:
            with self.turn("B", microbatch) or _NOTHING, Phase("backward", microbatch, self.statistics):
                self._go_back(microbatch, record, roots, seeds)
        back = record.take_gradients()
        fit_gradients(back, seeds)
        return back

    def _seeds(
        self,
        record: GraphRecord,
        microbatch: int,
        gradients: Mapping[int, Sequence[Tensor | None]],
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """The graph's roots and the gradient that enters at each; without one a root takes no part."""
        roots: list[GradientEdge] = []
        seeds: list[Tensor] = []
        # a value with several readers gets their gradients in the order of a plain loop: the last reader's first
        readers = sorted(record.roots, reverse=True) if len(record.roots) > 1 else record.roots
        for target in readers:
            arrived, edges = gradients[target], record.roots[target]
            if len(arrived) != len(edges):
                raise RunError(
                    f"stage {self.part.index}, microbatch {microbatch}: {len(arrived)} gradients came back from "
                    f"stage {target} for {len(edges)} tensors that want one"
                )
            for edge, gradient in zip(edges, arrived, strict=True):
                if gradient is not None:
                    roots.append(edge)
                    seeds.append(gradient)
        if record.loss is not None and loss_seed is not None:
            roots.append(record.loss)
            seeds.append(loss_seed)
        for edge in record.extra:
            assert extra_seed is not None
            roots.append(edge)
            seeds.append(extra_seed.clone())  # one of all would be added to by a leaf that adopts it
        return roots, seeds

    def _go_back(self, _: int, record: GraphRecord, roots: list[GradientEdge], seeds: list[Tensor]) -> None:
        """`torch.autograd.backward`, without its questions about tensors that are edges here."""
        self.fresh.before()
        _ENGINE.run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
        self.fresh.after()

    def weights(self, microbatch: int) -> None:
        """W: the weight gradients that were put off."""
        deferred = self._waiting.pop(microbatch, None)
        if deferred is None:
            raise RunError(f"stage {self.part.index} has no weight gradient of microbatch {microbatch} put off")
        self.fresh.before()
        deferred.run()
        self.fresh.after()


def _afresh(value: Any) -> Any:
    """The same tensors in containers of their own."""
    return pytree.tree_map(lambda leaf: leaf, value)


def _save_nothing(tensor: Tensor) -> Tensor | None:
    """But for what a loss can be understood by: its targets, and what it is divided by."""
    return tensor.detach() if tensor.dim() < 2 or not tensor.is_floating_point() else None


def _never_unpack(saved: Tensor | None) -> Tensor:
    if saved is not None:
        return saved
    raise ModelError("a stage that is recomputed took a gradient inside its own forward; use recompute='never' for it")
