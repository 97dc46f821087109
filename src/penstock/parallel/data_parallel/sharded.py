"""Sharded data parallelism: torch's FSDP2, driven by the program and by nothing else.

`fully_shard` brings the sharded parameters, the all-gather, the reduce-scatter and the mixed precision, and hooks that
decide for themselves when to gather, to free and to reduce: before every forward, after every backward of every
microbatch. In a pipeline these moments are planned (`UNSHARD`, `RESHARD`, `REDUCE_GRAD`) and proved, so the hooks are
taken off, and each action calls the one thing that it means. Gradients add up over microbatches in the whole
parameters, and are reduced once. This file and `wrapped_stages` are the only ones that know how FSDP2 looks inside.

Two things stay whole, and are reduced as in plain data parallelism: parameters that several stages share, because a
group of FSDP's belongs to one stage, and scalars, which FSDP2 does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, RunError
from penstock.model.part import StagePart
from penstock.runtime.engine.executor import Executor
from penstock.runtime.state.ownership import Run
from penstock.schedule import Action, Op


def check_shardable(parts: Mapping[int, StagePart], precise: bool, shared: set[nn.Parameter]) -> None:
    """Refuse, before anything is changed, what FSDP2 would refuse in words of its own or get wrong."""
    for stage, part in parts.items():
        module = part.module
        own = [parameter for parameter in module.parameters() if parameter not in shared]
        dtypes = {str(parameter.dtype) for parameter in own if parameter.requires_grad}
        if len(dtypes) > 1:
            raise ModelError(
                f"stage {stage} has trained parameters of {' and '.join(sorted(dtypes))}; FSDP reduces one dtype per "
                f"stage: cast them to one, or use replicate='ddp'"
            )
        if precise and any(parameter in shared for parameter in module.parameters()):
            raise ModelError(
                f"stage {stage} has parameters that are tied across stages (or scalars), which stay whole and are not "
                f"cast by ParallelOptions(shard_precision=); use precision='bf16' instead"
            )
        for name, parameter in module.named_parameters():
            if parameter in shared:
                continue
            whose = f"{part.names.get(name, name)} of stage {stage}"
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ModelError(
                    f"{whose} has a hook, which ParallelOptions(replicate='fsdp') cannot call: a shard takes the "
                    f"parameter's place. Change gradients between step() and optimizer.step(), or use replicate='ddp'"
                )
            if not getattr(parameter, "_local_tensor", parameter).is_contiguous():
                raise ModelError(
                    f"{whose} has shape {tuple(parameter.shape)} with strides {parameter.stride()} (a transposed or "
                    f"channels_last weight), and FSDP shards contiguous parameters only; set parameter.data = "
                    f"parameter.data.contiguous(), or use replicate='ddp'"
                )


class Sharder:
    """The sharded stages of one rank."""

    def __init__(
        self,
        executor: Executor,
        mesh: Any,
        window: int,
        precision: MixedPrecisionPolicy | None,
        whole: set[nn.Parameter],
    ) -> None:
        self.window = window
        self._groups: dict[int, list[Any]] = {}
        self._modules: dict[int, Any] = {}
        self._done: set[int] = set()
        self._fills = precision is not None and precision.param_dtype is not None
        for index, stage in executor.stages.items():
            module: Any = stage.module
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=False,
                mp_policy=precision or MixedPrecisionPolicy(),
                ignored_params=whole,
            )
            module.set_gradient_divide_factor(1.0)  # the seeds of the backward have weighed the replicas already
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            state._lazy_init()
            self._modules[index] = module
            self._groups[index] = state._fsdp_param_groups
            for group in state._fsdp_param_groups:
                group.reshard_after_backward = False  # RESHARD says when
            if precision is not None:
                stage.guarded.wrap = partial(_casting, precision)
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        self._gathering: dict[int, Callable[[], None]] = {}  # By stage: waits until its parameters are complete.
        self.present = 0

    def begin(self) -> None:
        self._done.clear()
        self.present = 0

    @property
    def managed(self) -> list[nn.Parameter]:
        """All sharded parameters, also those that are frozen for now."""
        return [each.sharded_param for groups in self._groups.values() for each in _parameters(groups)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters that are trained, in the order of their bits in `present`."""
        return [parameter for parameter in self.managed if parameter.requires_grad]

    def act(self, action: Action) -> None:
        stage = action.stage
        if action.op is Op.UNSHARD:
            handle = self._modules[stage].unshard(async_op=True)
            if handle is not None:
                self._gathering[stage] = partial(self._wait, handle, str(action))
            return
        self.before(stage)
        if action.op is Op.RESHARD:
            self._modules[stage].reshard()
        else:
            self._note(stage)
            self._reduce(stage)

    def _wait(self, handle: Any, what: str) -> None:
        with self.waiting(what):  # a compute is where this ends, and it must not look busy meanwhile
            handle.wait()

    def drain(self, action: Action) -> None:
        """Run the collective of this action although the step has failed here: others wait in it."""
        if action.op is not Op.REDUCE_GRAD:
            self.act(action)
        elif action.stage not in self._done:
            self.before(action.stage)
            forget_gradients(self._groups[action.stage])
            self._reduce(action.stage)

    def _note(self, stage: int) -> None:
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        for each in _parameters(self._groups[stage]):
            place = places.get(id(each.sharded_param))
            if place is None:
                continue
            if not hasattr(each, "_unsharded_param"):  # The attribute exists once the stage has been gathered.
                raise RunError("gradients are reduced before the stage was ever whole")
            if each.unsharded_accumulated_grad is not None or each._unsharded_param.grad is not None:
                self.present |= 1 << place

    def _reduce(self, stage: int) -> None:
        self._done.add(stage)
        for group in self._groups[stage]:
            group.post_backward()
            group.finalize_backward()
            group._training_state = type(group._training_state).IDLE

    def before(self, stage: int) -> None:
        """Wait until the parameters of a stage that is about to compute are complete, if that is under way."""
        wait = self._gathering.pop(stage, None)
        if wait is not None:
            wait()

    def after(self, stage: int) -> None:
        if self._fills:
            add_up(self._groups[stage])

    def reset(self) -> None:
        """Leave everything sharded and without gradients after a failed step."""
        for stage, module in self._modules.items():
            self._gathering.pop(stage, None)
            forget_gradients(self._groups[stage])
            with suppress(RuntimeError):  # A lost group has nothing to wait for.
                module.reset_iter_state()


def _parameters(groups: Iterable[Any]) -> Iterator[Any]:
    return (each for group in groups for each in group.fsdp_params)


def add_up(groups: Iterable[Any]) -> None:
    """Add up low-precision gradients after a backward, in the precision that they are reduced in."""
    for each in _parameters(groups):
        if hasattr(each, "_unsharded_param"):
            each.accumulate_unsharded_grad_if_needed()
            each.to_accumulated_grad_if_needed()


def forget_gradients(groups: Iterable[Any]) -> None:
    """Drop the gradients of complete parameters, which have not been reduced."""
    for each in _parameters(groups):
        each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def _casting(policy: MixedPrecisionPolicy, run: Run) -> Run:
    """Wrap a stage's forward with what FSDP's hooks do about dtypes at its boundary."""

    def cast(arrived: Any, args: Any, kwargs: Any) -> dict[int, Any]:
        inputs = policy.param_dtype if policy.cast_forward_inputs else None
        emitted: dict[int, Any] = _to(policy.output_dtype, run(*_to(inputs, (dict(arrived), args, dict(kwargs)))))
        return emitted

    return cast


def _to(dtype: torch.dtype | None, value: Any) -> Any:
    if dtype is None:
        return value
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)
