"""Stages that the user has wrapped for data parallelism: torch's `fully_shard`, `replicate` or DistributedDataParallel.

These reduce gradients by hooks of their own, when a backward ends. In a pipeline a stage has a backward per microbatch,
and where that is split, most gradients come later still, in `W`. So in a step the wrappers are told to reduce nothing;
the program's `REDUCE_GRAD` lets them do it once, in their own way: with their buckets, precision, meshes and hooks.
`UNSHARD` and `RESHARD` say when a sharded stage is complete. What the user has set on the wrappers, such as
`set_requires_gradient_sync(False)` or `no_sync()`, holds for the step as a whole.

The replicas belong to the user: each is a pipeline of its own, with its own batch and loss. To have them watched,
weighed and named in errors, pass plain modules and `mesh=` instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from penstock.errors import UsageError
from penstock.parallel.data_parallel.reduce import part_of
from penstock.parallel.data_parallel.sharded import add_up, forget_gradients
from penstock.runtime.engine.replication import Replication
from penstock.runtime.optim.norms import PartialNorm, join_partial, norm_of
from penstock.schedule import Action, Op, Schedule

_ENGINE = torch.autograd.Variable._execution_engine
SETTINGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "post_forward_mesh_info")


class UserParallel(Replication):
    """One replica as far as the pipeline knows; its parameters may be DTensors of the user's."""

    overlaps = False

    def whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def part_of(self, value: Any, current: Any) -> Any:
        return part_of(value, current)

    def norm(self, gradients: Sequence[Tensor], order: float, foreach: bool | None) -> PartialNorm | None:
        norms = [norm_of([each for each in gradients if not isinstance(each, DTensor)], order, foreach)]
        spread: dict[Any, list[Tensor]] = {}
        for each in gradients:
            if isinstance(each, DTensor):
                spread.setdefault(each.device_mesh, []).append(each)
        for parts in spread.values():
            total: Any = get_total_norm(parts, order, foreach=foreach)
            norms.append((total.full_tensor().item(), parts[0].dtype))
        return join_partial(norms, order)


class WrappedStages(UserParallel):
    """The wrapped stages of one rank. `pipeline`: the processes that have the stages of this pipeline."""

    is_alone = False

    def __init__(self, modules: Mapping[int, nn.Module], pipeline: Collection[int]) -> None:
        self._wrappers: dict[int, list[_Sharded | _Ddp]] = {}
        for stage, module in modules.items():
            inside = [_Ddp(each, stage) for each in module.modules() if isinstance(each, DistributedDataParallel)]
            found: list[_Sharded | _Ddp] = [*_sharded(module), *inside]
            self._wrappers[stage] = found
            over = {rank for each in found for rank in each.ranks()}
            others = sorted(over.intersection(pipeline) - {dist.get_rank()})
            if others:
                raise UsageError(
                    f"stage {stage} is wrapped over the processes {sorted(over)}, of which {others} have other stages "
                    f"of this pipeline: gradients of different layers would be averaged; wrap it over the processes "
                    f"that have copies of the same stage (mesh['dp']), and give PipelineStage(group=) those that have "
                    f"the stages of one pipeline (mesh.get_group('pp'))"
                )

    @contextmanager
    def step(self, program: Schedule, training: bool) -> Iterator[Self]:
        wrappers = [each for stage in self._wrappers.values() for each in stage]
        for each in wrappers:
            each.begin(training)
        try:
            yield self
        except BaseException:
            for each in wrappers:
                each.forget()
            raise
        finally:
            for each in wrappers:
                each.end()

    def act(self, action: Action) -> None:
        for each in self._wrappers.get(action.stage, ()):
            if action.op is Op.UNSHARD:
                each.unshard()
            elif action.op is Op.RESHARD:
                each.reshard()
            else:
                each.reduce()

    # -- around a computation: see `ParallelHooks`

    def before(self, stage: int) -> None:
        for each in self._wrappers.get(stage, ()):
            each.complete()

    def after(self, stage: int) -> None:
        """Note that the stage has new gradients."""
        for each in self._wrappers.get(stage, ()):
            each.add_up()


class _Sharded:
    """One outermost module that `fully_shard`, or `replicate`, was called on, with those inside of it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._modules: list[Any] = [each for each in root.modules() if isinstance(each, FSDPModule)]
        self._state = root._get_fsdp_state()
        self._state._lazy_init()
        self._groups = [group for each in self._modules for group in each._get_fsdp_state()._fsdp_param_groups]
        self._before: list[dict[str, Any]] | None = None  # settings of the user's, in a training step
        self._gathering: list[Any] = []

    def ranks(self) -> Iterator[int]:
        for group in self._groups:
            yield from group.mesh_info.mesh.mesh.flatten().tolist()

    def begin(self, training: bool) -> None:
        if not training:
            return
        self._before = [{name: getattr(group, name) for name in SETTINGS} for group in self._groups]
        self._hold()

    def _hold(self) -> None:
        """Reduce nothing, and stay complete: the program says when."""
        self._state._state_ctx.is_last_backward = False
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = group.reshard_after_backward = False
            group.post_forward_mesh_info = None

    def unshard(self) -> None:
        self._gathering = [each.unshard(async_op=True) for each in self._modules]

    def complete(self) -> None:
        if self._before is None:
            return  # an evaluation: its own hooks gather and free
        for handle in self._gathering:
            handle.wait()
        self._gathering = []
        for each in self._modules:
            each.unshard()  # does nothing where it is complete

    def reshard(self) -> None:
        for each in self._modules:
            each.reshard()

    def reduce(self) -> None:
        assert self._before is not None
        self.complete()
        for group, before in zip(self._groups, self._before, strict=True):
            group.reduce_grads, group.all_reduce_grads = before["reduce_grads"], before["all_reduce_grads"]
        self._state._state_ctx.is_last_backward = True
        self._state._root_post_backward_final_callback()
        self._hold()

    def add_up(self) -> None:
        add_up(self._groups)

    def forget(self) -> None:
        self._gathering = []
        if self._before is not None:
            forget_gradients(self._groups)
        with suppress(RuntimeError):  # A lost group has nothing to wait for.
            self._root.reset_iter_state()

    def end(self) -> None:
        before, self._before = self._before, None
        for group, settings in zip(self._groups, before or (), strict=before is not None):
            for name, value in settings.items():
                setattr(group, name, value)
        self._state._state_ctx.is_last_backward = True
        self.reshard()


class _Ddp:
    """One module in DistributedDataParallel: its own reducer runs, once, on gradients that are complete."""

    def __init__(self, module: DistributedDataParallel, stage: int) -> None:
        if module.static_graph:
            raise UsageError(
                f"stage {stage} is wrapped in DistributedDataParallel(static_graph=True), which counts the backwards "
                f"of its first iteration; leave static_graph out"
            )
        self._module: Any = module
        self._syncs: bool | None = None  # what the user has set, in a training step

    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._module.process_group)

    def begin(self, training: bool) -> None:
        if training:
            self._syncs = self._module.require_backward_grad_sync
            self._module.require_backward_grad_sync = False

    def reduce(self) -> None:
        if not self._syncs:
            return
        module = self._module
        used = [
            each
            for name, each in module.module.named_parameters()
            if each.requires_grad
            and name not in module.parameters_to_ignore
            and not (module.find_unused_parameters and each.grad is None)
        ]
        if not used:
            return
        # DDP reduces a gradient when autograd has added to it: so nothing is added to each of them
        with torch.enable_grad():
            roots = [each.view_as(each) for each in used]
        zeros = [torch.zeros((), dtype=each.dtype, device=each.device).expand(each.shape) for each in used]
        module.require_backward_grad_sync = True
        try:
            module.reducer.prepare_for_backward(roots if module.find_unused_parameters else [])
            _ENGINE.run_backward(
                tuple(roots), tuple(zeros), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            module.require_backward_grad_sync = False

    def end(self) -> None:
        if self._syncs is not None:
            self._module.require_backward_grad_sync, self._syncs = self._syncs, None

    def unshard(self) -> None:
        """Make its parameters complete on every replica."""

    reshard = complete = add_up = forget = unshard


def _sharded(module: nn.Module) -> Iterator[_Sharded]:
    """Yield the outermost ones of the modules that are sharded, the module itself if it is one."""
    if isinstance(module, FSDPModule):
        yield _Sharded(module)
        return
    for child in module.children():
        yield from _sharded(child)
