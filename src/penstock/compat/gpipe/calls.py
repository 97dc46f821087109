"""The calls of a model whose stages are attached to the user's graph: see `attached_stage`.

A `ForwardCall` is one forward: what its stages left for its backward, and what that needs to be the same again.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.gpipe.attached_stage import AttachedStage, Outputs, Stages, WeightVersions, check_weights, muted
from penstock.devices import to_device
from penstock.errors import PeerFailure, RunError
from penstock.model.replay.modes import in_modes
from penstock.model.staged_model import StagedModel
from penstock.runtime.backward.saved_graph import SavedGraph
from penstock.runtime.batch.microbatch import Batch, count_for, split_batch
from penstock.runtime.batch.outputs import merge
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.loss.shares import Shares
from penstock.runtime.state.randomness import Compute, StepCounter
from penstock.runtime.transport import ThreadTransport
from penstock.schedule import Action, Op, Schedule, build, lower, verify
from penstock.schedule.lowering.gather import gather

# With one stage a rank: all forwards, then all backwards, the last microbatch first.
SCHEDULE = "looped-bfs"
BACKWARD = frozenset({Op.B, Op.SEND_B, Op.RECV_B})


class Calls:
    """The ranks that serve all calls of one model, and the two programs for each number of microbatches."""

    def __init__(
        self,
        split: StagedModel,
        chunks: int,
        checkpoint: str,
        devices: Sequence[torch.device] | None,
        batch_dims: Mapping[str | int, Any],
        timeout: float,
    ) -> None:
        self.split, self.chunks, self.checkpoint, self.batch_dims = split, chunks, checkpoint, dict(batch_dims)
        self._devices = dict(enumerate(devices or ()))
        self._counter = StepCounter(0)
        transports = ThreadTransport.group(split.stages, None, timeout, devices)
        # Several threads may call the model, as where it is two stages of another.
        self.turn = threading.RLock()
        self._programs: dict[tuple[int, frozenset[int]], tuple[Schedule, Schedule]] = {}
        self.stages: list[AttachedStage] = []
        placement = self.programs(chunks)[0].placement
        self.ranks = LocalRanks(split, placement, transports, self._counter, self._devices, AttachedStage)
        every = (stage for executor in self.ranks.executors.values() for stage in executor.stages.values())
        self.stages += [stage for stage in every if isinstance(stage, AttachedStage)]
        self.one_path = not any(part.reads_inputs for part in split.parts)  # whatever the batch is like

    def programs(self, count: int) -> tuple[Schedule, Schedule]:
        """Return the forward part and the backward part of the schedule, proved as one."""
        gathering = frozenset(stage.part.index for stage in self.stages if stage.gathers)
        if (count, gathering) not in self._programs:
            schedule = build(SCHEDULE, self.split.stages, count, 1).replace(topology=self.split.topology)
            program = gather(lower(schedule), gathering)
            verify(program)

            def half(backward: bool) -> Schedule:
                def belongs(action: Action | None) -> bool:
                    return action is not None and (action.op in BACKWARD) is backward

                return program.replace([[action for action in row if belongs(action)] for row in program.rows])

            self._programs[count, gathering] = half(False), half(True)
        return self._programs[count, gathering]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Any:
        """Return the model's output for one batch."""
        count = count_for(self.chunks, args, kwargs, None, self.batch_dims) or 1
        attached = torch.is_grad_enabled()
        batch = split_batch(count, args, kwargs, None, {}, self.batch_dims, attached=attached)
        recomputed = {"never": 0, "except_last": count - 1, "always": count}[self.checkpoint]
        call = ForwardCall(self, batch, recomputed if training and attached else 0)
        with self.turn:
            outputs = call.forward(attached)
        if attached:
            outputs = call.join(outputs)
        return merge(outputs, self.batch_dims.get("output", 0))

    def undone_if_it_fails(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Any:
        """Return the model's output for one batch; a call that fails leaves the model as it was."""
        with self.turn, self.ranks.transactions[0](training=True, adds=False, runs_hooks=False):
            return self(args, kwargs, training)


class ForwardCall:
    """One forward of the model, and later its backward."""

    def __init__(self, calls: Calls, batch: Batch, recomputed: int) -> None:
        self.calls, self._batch = calls, batch
        self._count = len(batch.args)
        self._recomputed = frozenset(range(recomputed))
        self._given = [pytree.tree_flatten((args, kw)) for args, kw in zip(batch.args, batch.kwargs, strict=True)]
        # The inputs that want a gradient, by microbatch.
        self._requiring = [[leaf for leaf in leaves if _requires_grad(leaf)] for leaves, _ in self._given]
        self._pieces: list[list[list[Tensor]]] = []  # the same, for each rank its own
        self._parameters: list[list[Tensor]] = []  # Indexed by rank.
        # Indexed by rank; None: there is no backward (any more).
        self._records: list[dict[int, SavedGraph]] | None = None
        self.outputs: list[Tensor] = []  # Those that want a gradient.
        self.arrived: Sequence[Tensor | None] = ()  # the gradients of these
        self._seed = _seed_here()
        # The context of the forward, also for what runs again in the backward.
        self._context = copy_context()
        self._programs = calls.programs(self._count)

    # -- forward

    def forward(self, attached: bool) -> list[Any]:
        """Return the outputs of all microbatches, apart from any graph."""
        calls = self.calls
        inputs = self._inputs(attached)
        calls.ranks.wait_for_late_ranks()
        calls._counter.seed = self._seed
        for rank, stage in enumerate(calls.stages):
            self._parameters.append([p for p in stage.module.parameters() if p.requires_grad] if attached else [])
            stage.begin(self._parameters[rank], self._pieces[rank])
        self._run(0, inputs)
        last = calls.ranks.last
        assert last is not None
        outputs: list[Any] = last.computations.outputs.take()
        if calls.ranks.thread_randomness.draw:
            torch.rand((), device="cpu")  # the next call shall have other random numbers
        calls.ranks.end_batch()
        if attached:
            self._keep()
        for stage in calls.stages:
            stage.end()
        return outputs

    def _inputs(self, attached: bool) -> dict[int, StepInput]:
        """Return what each rank works on: its own leaves in the place of inputs that want a gradient."""
        found = {}
        for rank in range(self.calls.split.stages):
            device = self.calls._devices.get(rank)
            pieces: list[list[Tensor]] = []
            args, kwargs = [], []
            for leaves, spec in self._given:
                own = [_piece(leaf, device) for leaf in leaves]
                pieces.append([leaf for leaf in own if attached and _requires_grad(leaf)])
                one, two = pytree.tree_unflatten(own, spec)
                args.append(one)
                kwargs.append(two)
            self._pieces.append(pieces)
            batch = Batch(args, kwargs, self._batch.targets, self._batch.loss_kwargs, self._batch.rows, False)
            found[rank] = self._input(batch, attached)
        return found

    def _input(self, batch: Batch, training: bool, gradients: Sequence[list[Tensor | None]] = ()) -> StepInput:
        return StepInput(
            batch,
            Shares(self._count, 1.0),
            join=list,
            training=training,
            recompute=self._recomputed,
            batch_dims=self.calls.batch_dims,
            attached=True,
            output_gradients=list(gradients),
        )

    def _keep(self) -> None:
        """Take what the stages hold off them."""
        stages = self.calls.stages
        self._records = [stage.saved for stage in stages]
        self._alone = frozenset(self.calls.ranks.thread_randomness.alone)
        for stage, parameters in zip(stages, self._parameters, strict=True):
            parameters += stage.foreign.values()
        self._modules: list[nn.Module] = []  # They run again in the modes that they had.
        self._modes: list[bool] = []
        self._weights: list[WeightVersions] = []  # Indexed by rank, where forwards run again.
        if self._recomputed:
            self._modules = [module for stage in stages for module in stage.module.modules()]
            self._modes = [module.training for module in self._modules]
            self._weights = [[(weight, weight._version) for weight in stage.module.parameters()] for stage in stages]

    def join(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs of the forward, as nodes of the user's graph."""
        flat = [pytree.tree_flatten(output) for output in outputs]
        self.outputs = [leaf.detach() for leaves, _ in flat for leaf in leaves if _requires_grad(leaf)]
        self._sizes = [sum(map(_requires_grad, leaves)) for leaves, _ in flat]
        if not self.outputs:
            self._records = None
            return outputs
        every = [leaf for each in (*self._requiring, *self._parameters) for leaf in each]
        self._sources = list({id(leaf): leaf for leaf in every}.values())
        token = Stages.apply(self, *self._sources)  # type: ignore[no-untyped-call]
        joined = iter(Outputs.apply(self, token))  # type: ignore[no-untyped-call]
        return [
            pytree.tree_unflatten([next(joined) if _requires_grad(leaf) else leaf for leaf in leaves], spec)
            for leaves, spec in flat
        ]

    # -- backward

    def backward(self) -> list[Tensor | None]:
        """Return the gradients of `sources`, from those of the outputs."""
        if self._records is None:
            raise RunError(
                "the backward of this forward has run already, and its activations are freed; to run it twice, pass "
                "retain_graph=True to the first backward()"
            )
        calls, stages = self.calls, self.calls.stages
        keep_graph = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        for stage, weights in zip(stages, self._weights, strict=False):
            check_weights(stage.module.parameters(), weights)
        waiting, self.arrived = iter(self.arrived), ()
        by_microbatch = [[next(waiting) for _ in range(size)] for size in self._sizes]
        inputs = {rank: self._input(self._batch, True, by_microbatch) for rank in range(len(stages))}
        calls.ranks.wait_for_late_ranks()
        calls._counter.seed = self._seed
        for rank, stage in enumerate(stages):
            stage.begin([p for p in self._parameters[rank] if p.requires_grad], self._pieces[rank], keep_graph)
            stage.saved = dict(self._records[rank]) if keep_graph else self._records[rank]
        if not keep_graph:
            self._records = None
        everything = [parameter for each in self._parameters for parameter in each]
        with muted(everything), in_modes(self._modules, self._modes), torch.enable_grad():
            self._run(1, inputs, self._alone)
        found = self._found()
        for stage in stages:
            stage.end()
        return found

    def _found(self) -> list[Tensor | None]:
        """Return the gradient of each source: summed over stages, in their order."""
        sums: dict[int, Tensor] = {}

        def add(source: Tensor, gradient: Tensor | None) -> None:
            if gradient is not None:
                gradient = gradient.to(source.device)
                known = sums.get(id(source))
                sums[id(source)] = gradient if known is None else known + gradient

        for rank, stage in enumerate(self.calls.stages):
            for sources, pieces in zip(self._requiring, self._pieces[rank], strict=True):
                for source, piece in zip(sources, pieces, strict=True):
                    add(source, piece.grad)
                    piece.grad = None
            for parameter, gradient in zip(stage.parameters, stage.found, strict=True):
                add(parameter, gradient)
        return [sums.get(id(source)) for source in self._sources]

    # -- either

    def _run(self, half: int, inputs: dict[int, StepInput], alone: frozenset[Compute] = frozenset()) -> None:
        """Run one half; an error of a stage comes out as it was raised there, with the place added."""
        program = self._programs[half]
        try:
            with self.calls.ranks.computing(alone):
                self.calls.ranks.run(program, inputs, variables=self._context)
            return
        except PeerFailure as failure:
            cause = failure.__cause__
            if cause is None:
                raise
            what = ("forward", "backward")[half]
            cause.add_note(
                f"raised in stage {failure.stage} of {self.calls.split.stages}, {what} of microbatch "
                f"{failure.microbatch} of {self._count} ({failure.action})"
            )
        try:
            raise cause
        finally:
            del cause  # an error that its own frame holds would keep the whole step alive


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _piece(leaf: Any, device: torch.device | None) -> Any:
    """Make a leaf of a stage's own for a piece of the model's input."""
    if not isinstance(leaf, Tensor):
        return leaf
    moved = to_device(leaf, device)
    return moved.detach().requires_grad_() if leaf.requires_grad else moved


def _seed_here() -> int:
    """Return a seed that follows from the generator's state, which stays as it is: so `manual_seed` repeats a call."""
    state = torch.get_rng_state()
    digest = hashlib.blake2b(ctypes.string_at(state.data_ptr(), state.nbytes), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
