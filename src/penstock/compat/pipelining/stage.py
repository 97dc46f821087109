"""A stage as torch has it: a submodule and its place. Every rank makes only its own.

`Pipeline` wants to see all stages on every rank, to check that all mean the same model. So ranks tell each other what
their stages hold, by name and shape, and in the place of other ranks' stages stand modules with nothing in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.compat.pipelining.chunks import ByChunk
from penstock.errors import ModelError, PenstockError, UsageError
from penstock.messages.collective import all_gather

__all__ = ["PipelineStage", "RemoteStage", "all_stages", "as_tree"]


class _PipelineStageBase(ByChunk):
    """What schedules know of a stage, made by hand or cut from a model."""

    pipe: Any = None  # the Pipe that it was cut from

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise UsageError(f"stage_index={stage_index}: {num_stages} stages have the numbers 0 to {num_stages - 1}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = torch.device("cpu" if device is None else device)
        self.group = group
        self.dw_builder = dw_builder
        self.group_rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.group_size = dist.get_world_size(group) if dist.is_initialized() else 1
        if self.group_size > num_stages:
            raise UsageError(f"{self.group_size} ranks cannot share {num_stages} stages; each needs at least one")
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

    def clear_runtime_states(self) -> None:
        """Forget the last step's outputs."""
        self.output_chunks = []


class PipelineStage(_PipelineStageBase):
    """A stage made by hand. Shapes need no declaring: `input_args`, `output_args` and the like are not looked at."""

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


class RemoteStage(nn.Module):
    """Stands for a stage of another rank: its names, shapes and dtypes, without memory."""

    def __init__(self, held: Sequence[Held]) -> None:
        super().__init__()
        known: dict[int, Tensor] = {}
        for name, shape, dtype, trained, key in held:
            tensor = known.get(key)
            if tensor is None:
                if trained is None:
                    tensor = torch.zeros((), dtype=dtype).expand(shape)  # a buffer has values; these take no room
                else:
                    tensor = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trained)
                known[key] = tensor
            hang(self, name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """It runs on another rank."""
        raise ModelError("this stage lives on another rank")


Held = tuple[str, tuple[int, ...], torch.dtype, bool | None, int]  # name, shape, dtype, trained (None: buffer), which


def hang(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor into a tree of modules under its dotted name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)


def as_tree(root: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """The same tensors under these names."""
    for name, tensor in tensors:
        hang(root, name, tensor)
    return root


def _held(module: nn.Module) -> list[Held]:
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    return [
        (
            name,
            tuple(value.shape),
            value.dtype,
            value.requires_grad if isinstance(value, nn.Parameter) else None,
            id(value),
        )
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]


def all_stages(stages: Sequence[_PipelineStageBase], check: Callable[[], None], trains: bool) -> list[nn.Module]:
    """All ranks' stages in order, with stand-ins for others'. Every rank must call it; a refusal is heard by all.

    `trains`: whether this rank's step has a backward. All must say the same, or some would wait for gradients for ever.
    """
    first, refusal = stages[0], None
    try:
        check()
    except PenstockError as error:
        refusal = error
    mine = (
        None if refusal is None else str(refusal),
        first.num_stages,
        {stage.stage_index: _held(stage.submod) for stage in stages},
        trains,
    )
    answers: list[Any] = [mine]
    if first.group_size > 1:
        answers = all_gather(mine, first.group)
    if refusal is not None:
        raise refusal
    for rank, (problem, count, _, _) in enumerate(answers):
        if problem is not None:
            raise UsageError(f"rank {rank} cannot make its schedule: {problem}")
        if count != first.num_stages:
            raise UsageError(f"rank {rank} says num_stages={count}, rank {first.group_rank} says {first.num_stages}")
    _all_or_none([backward for *_, backward in answers])
    owners: dict[int, list[int]] = {stage: [] for stage in range(first.num_stages)}
    for rank, (_, _, held, _) in enumerate(answers):
        for index in held:
            owners[index].append(rank)
    wrong = {stage: ranks for stage, ranks in owners.items() if len(ranks) != 1}
    if wrong:
        stage, ranks = next(iter(wrong.items()))
        raise UsageError(
            f"stage {stage} is on {'no rank' if not ranks else f'ranks {ranks}'}; each of the "
            f"{first.num_stages} stages must be on exactly one"
        )
    own = {stage.stage_index: stage.submod for stage in stages}
    return [own[index] if index in own else RemoteStage(answers[owners[index][0]][2][index]) for index in owners]


def _all_or_none(trains: Sequence[bool]) -> None:
    without = [rank for rank, backward in enumerate(trains) if not backward]
    if without and len(without) < len(trains):
        raise UsageError(
            f"ranks {without} have no loss_fn, so that their step has no backward, and the others have one; pass the "
            f"same loss_fn to the schedule on every rank: it is called on the last stage's rank only"
        )
