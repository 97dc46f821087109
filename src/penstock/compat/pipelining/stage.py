"""A stage as torch has it: a submodule and its place. Every rank makes only its own.

`Pipeline` wants to see all stages on every rank, to check that all mean the same model. So ranks tell each other what
their stages hold, by name and shape, and in the place of other ranks' stages stand modules with nothing in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from penstock.compat.pipelining.chunks import ByChunk
from penstock.compat.pipelining.errors import TooManyRanks
from penstock.errors import ModelError, UsageError
from penstock.model.original.wrappers import FSDP, wrappings
from penstock.model.part import hang
from penstock.parallel.group.agreement import agree
from penstock.rules import check_count, is_index
from penstock.runtime.messages.collective import all_gather

DTENSOR_MODULE = "torch.distributed.tensor"  # slow to import; who has made a DTensor has imported it


class _PipelineStageBase(ByChunk):
    """What schedules know of a stage, made by hand or cut from a model."""

    pipe: Any = None  # the Pipe that it was cut from
    get_mesh: Any = None  # (names of axes, layout) -> the mesh over which a DTensor from another stage is spread
    declared: Sequence[Any] = ()  # tensors that were passed to show shapes; where they are DTensors, their meshes count

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        check_count("num_stages", num_stages)
        if not is_index(stage_index, num_stages):
            raise UsageError(
                f"Stage index {stage_index!r} is out of range of {num_stages}; stages have the numbers 0 to "
                f"{num_stages - 1}"
            )
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device("cpu" if device is None else device)
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.group_size = dist.get_world_size(group) if dist.is_initialized() else 1
        if self.group_size > num_stages:
            raise TooManyRanks(
                f"Pipeline group size {self.group_size} cannot be larger than number of stages {num_stages}; each rank "
                f"needs at least one stage"
            )
        self.stage_index_to_group_rank = {stage: stage % self.group_size for stage in range(num_stages)}
        self.has_backward = False
        self.output_chunks: list[Any] = []

    @property
    def is_first(self) -> bool:
        """Whether the model's inputs come in here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the model's outputs come out here."""
        return self.stage_index == self.num_stages - 1

    @property
    def is_spread(self) -> bool:
        """Whether DTensors may cross between it and other stages."""
        kind: Any = getattr(sys.modules.get(DTENSOR_MODULE), "DTensor", ())
        return self.get_mesh is not None or any(
            isinstance(t, kind) for t in (*self.submod.parameters(), *self.declared)
        )

    def clear_runtime_states(self) -> None:
        self.output_chunks = []


class PipelineStage(_PipelineStageBase):
    """A stage that you made yourself. Shapes need not be declared.

    Args:
        submodule: The module of this stage.
        stage_index: The stage.
        num_stages: The number of stages of the pipeline.
        device: The device of the stage.
        input_args: Read for meshes only.
        output_args: What the stage returns for a microbatch, of any number of rows; anything else is an error.
        output_grads: Not used.
        input_grads: Not used.
        group: The process group of the pipeline's ranks.
        dw_builder: A function that returns one that computes weight gradients, as in torch.
        get_mesh: A function of (names of axes, layout) that returns the mesh of DTensors that come from other stages,
            where no parameter of this rank's stages is spread over it.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Any = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, group, dw_builder)
        if not isinstance(submodule, nn.Module):
            raise UsageError(f"the submodule of stage {stage_index} is a {type(submodule).__name__}; pass an nn.Module")
        if get_mesh is not None and not callable(get_mesh):
            raise UsageError(f"get_mesh={get_mesh!r}: pass a function of (names of axes, layout) that returns a mesh")
        self.get_mesh = get_mesh
        self.declared = pytree.tree_leaves((input_args, output_args, output_grads, input_grads))
        if output_args is not None:
            submodule.register_forward_hook(partial(_check_declared, stage_index, _kinds(output_args)))


def _kinds(value: Any) -> list[tuple[torch.dtype, tuple[int | str, ...]]]:
    """Return the types and shapes of all tensors in a value, with a letter for the rows."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [(leaf.dtype, ("B", *leaf.shape[1:]) if leaf.dim() else ()) for leaf in tensors]


def _check_declared(stage: int, declared: Sequence[Any], _: nn.Module, __: Any, output: Any) -> None:
    found = _kinds(output)
    if found != declared:
        listed = [
            ", ".join(f"{dtype} of shape ({', '.join(map(str, shape))})" for dtype, shape in kinds)
            for kinds in (found, declared)
        ]
        raise ModelError(f"stage {stage} returned {listed[0]}, but its output_args= declare {listed[1]} (B: the rows)")


@dataclass(frozen=True)
class PipeInfo:
    """What `build_stage` needs to know of a pipe."""

    num_stages: int
    has_loss_and_backward: bool = False
    pipe: Any = field(default=None, repr=False)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStageBase:
    """Build one stage of a pipe, for a schedule.

    Args:
        stage_module: What `Pipe.get_stage_module` returned, or that in `DistributedDataParallel`.
        stage_index: The stage.
        pipe_info: What `Pipe.info` returned.
        device: The device of the stage.
        group: The process group of the pipeline's ranks.
    """
    inside = stage_module.module if isinstance(stage_module, DistributedDataParallel) else stage_module
    if pipe_info.pipe is not None and (
        inside is not pipe_info.pipe.get_stage_module(stage_index) or FSDP in wrappings(inside)
    ):
        raise UsageError(
            f"stage {stage_index} is something else than pipe.get_stage_module({stage_index}) gave; a Pipe runs the "
            f"model's own modules, so pass that as it is, or in DistributedDataParallel. To shard it, make its stages "
            f"by hand, as PipelineStages, or set schedule.options = {{'mesh': ..., 'parallel_options': ...}}"
        )
    stage = _PipelineStageBase(stage_module, stage_index, pipe_info.num_stages, device, group)
    stage.pipe = pipe_info.pipe
    return stage


class RemoteStage(nn.Module):
    """Stands for a stage of another rank: its names, shapes and dtypes, without memory.

    What it has and what its state lists may differ: hooks of a module may save one parameter as three tensors.
    """

    def __init__(self, held: HeldTensors, wrapped_in: frozenset[str]) -> None:
        super().__init__()
        self.wrapped_in = wrapped_in
        parameters, self._listed = held
        known: dict[int, nn.Parameter] = {}
        for name, shape, dtype, trained, key in parameters:
            if key not in known:
                known[key] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trained)
            hang(self, name, known[key])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("this stage lives on another rank")

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return what the stage's own state lists; values that are no parameters take no room."""
        own = dict(self.named_parameters(remove_duplicate=False))
        found = {} if destination is None else destination
        for name, shape, dtype in self._listed:
            value = own[name] if name in own else torch.zeros((), dtype=dtype, device="cpu").expand(shape)
            found[prefix + name] = value if keep_vars else value.detach()
        return found


HeldParameter = tuple[str, tuple[int, ...], torch.dtype, bool, int]  # name, shape, dtype, trained, which
HeldTensors = tuple[list[HeldParameter], list[tuple[str, tuple[int, ...], torch.dtype]]]  # also what the state lists


def _held(module: nn.Module) -> HeldTensors:
    parameters = [
        (name, tuple(value.shape), value.dtype, value.requires_grad, id(value))
        for name, value in module.named_parameters(remove_duplicate=False)
    ]
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    listed = [
        (name, tuple(value.shape), value.dtype) for name, value in state.items() if isinstance(value, Tensor)
    ]  # State of another kind is left out.
    return parameters, listed


def all_stages(
    stages: Sequence[_PipelineStageBase], check: Callable[[], None], trains: bool
) -> tuple[list[nn.Module], bool]:
    """Collect all ranks' stages in order, with stand-ins for others', and whether any is spread over ranks.

    Every rank must call it; a refusal by `check` is heard by all. `trains`: whether this rank's step has a backward.
    All must say the same, or some would wait for gradients for ever.
    """
    first = stages[0]

    def describe() -> tuple[int, dict[int, Any], bool, bool]:
        check()
        held = {stage.stage_index: (_held(stage.submod), sorted(wrappings(stage.submod))) for stage in stages}
        return first.num_stages, held, trains, any(stage.is_spread for stage in stages)

    answers = agree(
        describe,
        lambda mine: all_gather(mine, first.group) if first.group_size > 1 else [mine],
        refuse=lambda rank, problem: UsageError(f"rank {rank} cannot make its schedule: {problem}"),
    )
    for rank, (count, *_) in enumerate(answers):
        if count != first.num_stages:
            raise UsageError(f"rank {rank} says num_stages={count}, rank {first.group_rank} says {first.num_stages}")
    without = [rank for rank, (_, _, backward, _) in enumerate(answers) if not backward]
    if without and len(without) < len(answers):
        raise UsageError(
            f"ranks {without} have no loss_fn, so that their step has no backward, and the others have one; pass the "
            f"same loss_fn to the schedule on every rank: it is called on the last stage's rank only"
        )
    found: dict[int, nn.Module] = {stage.stage_index: stage.submod for stage in stages}
    for index in range(first.num_stages):
        ranks = [rank for rank, (_, held, _, _) in enumerate(answers) if index in held]
        if len(ranks) != 1:
            raise UsageError(
                f"stage {index} is on {'no rank' if not ranks else f'ranks {ranks}'}; each of the "
                f"{first.num_stages} stages must be on exactly one"
            )
        if index not in found:
            held, wrapped = answers[ranks[0]][1][index]
            found[index] = RemoteStage(held, frozenset(wrapped))
    return [found[index] for index in range(first.num_stages)], any(spread for *_, spread in answers)
