"""Tensors spread over ranks: torch's DTensor, applied stage by stage, and carried across stage boundaries.

A DTensor only means something among the ranks of its mesh, and the stage that it goes to lives on another one. So what
leaves is this rank's part and how it is spread; what arrives is a DTensor on the receiver's own tp axis. Gradients go
back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, RunError, UsageError
from penstock.model.names import dotted_name
from penstock.model.part import StagePart
from penstock.parallel.tensor_parallel.tensor_plan import TensorPlan
from penstock.runtime.engine.stage import Stage
from penstock.runtime.loss.module import LOSS, StageAndLoss


def module_names(part: StagePart) -> dict[str, str]:
    """Return the names that a stage's modules have in the whole model, by their names in the stage."""
    found: dict[str, str] = {}
    for local, whole in part.names.items():
        near, far = local.split("."), whole.split(".")
        while near and far and near[-1] == far[-1]:
            near.pop()
            far.pop()
            if near:
                found.setdefault(".".join(near), ".".join(far))
    for name, _ in part.module.named_modules():
        above = name
        while above and above not in found:
            above = above.rpartition(".")[0]
        if name and above:
            found.setdefault(name, found[above] + name[len(above) :])
    return {name: whole for name, whole in found.items() if whole}


def spread(parts: Sequence[StagePart], local: Mapping[int, StagePart], plan: TensorPlan, mesh: Any) -> None:
    """Apply a plan to this rank's stages. Parameters that were one object are one object afterwards."""
    names = {part.index: module_names(part) for part in parts}
    styles = plan.resolve(dict.fromkeys(whole for known in names.values() for whole in known.values()))
    shared = _shared(local)
    for index, part in local.items():
        own = {name: styles[whole] for name, whole in names[index].items() if whole in styles}
        for name, style in own.items():
            try:
                parallelize_module(part.module.get_submodule(name), mesh, style, src_data_rank=None)
            except (NotImplementedError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"tensor_plan: {names[index][name]} ({type(part.module.get_submodule(name)).__name__}) cannot be "
                    f"spread by {type(style).__name__}: {error}"
                ) from error
    for places in shared:
        _join(places)


def _shared(local: Mapping[int, StagePart]) -> list[list[tuple[nn.Module, str, str]]]:
    """Find parameters that stand in several places of this rank's stages."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for part in local.values():
        for prefix, module in part.module.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    known = places.setdefault(id(parameter), [])
                    if (module, name) not in [(other, its) for other, its, _ in known]:
                        full = dotted_name(prefix, name)
                        known.append((module, name, part.names.get(full, full)))
    return [known for known in places.values() if len(known) > 1]


def _join(places: Sequence[tuple[nn.Module, str, str]]) -> None:
    values = [module._parameters[name] for module, name, _ in places]
    kinds = [value.placements if isinstance(value, DTensor) else None for value in values]
    if any(kind != kinds[0] for kind in kinds):
        listed = ", ".join(f"{full}: {kind or 'whole'}" for (_, _, full), kind in zip(places, kinds, strict=True))
        raise ModelError(
            f"tensor_plan spreads parameters that are tied in different ways ({listed}); give their modules styles "
            f"that spread them alike (an embedding and a colwise head do), or none"
        )
    for module, name, _ in places[1:]:
        module._parameters[name] = values[0]


SPREAD = (DTensor, AsyncCollectiveTensor)  # what is packed on its way to another stage
PLACEMENTS: dict[str, Callable[..., Placement]] = {"R": Replicate, "S": Shard, "P": Partial}  # as they travel


class SpreadPart:
    """A DTensor on its way: this rank's part of it, and how it is spread, over a mesh with which axes."""

    __slots__ = ("local", "mesh", "placements", "shape", "stride")

    def __init__(self, local: Tensor, placements: Any, shape: Any, stride: Any, mesh: MeshKey) -> None:
        self.local, self.placements, self.shape, self.stride, self.mesh = local, placements, shape, stride, mesh


pytree.register_pytree_node(
    SpreadPart,
    lambda value: ([value.local], (value.placements, value.shape, value.stride, value.mesh)),
    lambda leaves, context: SpreadPart(next(iter(leaves)), *context),
    serialized_type_name="penstock.Carried",
)


class SpreadValues:
    """How values cross between stages. `mesh_of` gives this rank's mesh with the axes that a sender's has.

    `gathers`: a user gets outputs as complete tensors, not as DTensors.
    """

    def __init__(self, mesh_of: Callable[[MeshKey], Any], *, gathers: bool = True) -> None:
        self._mesh_of, self._gathers = mesh_of, gathers

    def pack(self, value: Any) -> Any:
        """Put parts in the place of DTensors."""
        return value if type(value) is Tensor else pytree.tree_map_only(SPREAD, _packed, value)

    def unpack(self, value: Any) -> Any:
        """Put DTensors of this rank's mesh in the place of parts."""
        if type(value) is Tensor:
            return value
        return pytree.tree_map(self._unpacked, value, is_leaf=lambda each: isinstance(each, SpreadPart))

    def _unpacked(self, leaf: Any) -> Any:
        if not isinstance(leaf, SpreadPart):
            return leaf
        placements: list[Placement] = [PLACEMENTS[kind](*details) for kind, *details in leaf.placements]
        local, mesh = leaf.local.detach(), self._mesh_of(leaf.mesh)
        found = DTensor.from_local(local, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride)
        return found.requires_grad_(leaf.local.requires_grad)

    def full(self, value: Any) -> Any:
        """Return what a user gets to see: complete tensors, on every rank of the axis."""
        if self._gathers:
            value = pytree.tree_map_only(DTensor, DTensor.full_tensor, value)
        return pytree.tree_map_only(AsyncCollectiveTensor, AsyncCollectiveTensor.trigger_wait, value)


MeshKey = tuple[tuple[str, ...], tuple[tuple[Any, Any], ...]]  # names of the axes; by axis, sizes and strides


def mesh_key(mesh: Any) -> MeshKey:
    """Return what a mesh is known by on every rank: its axes, and how they lie in the world; not its processes."""
    return tuple(mesh.mesh_dim_names or ()), tuple((axis.shape, axis.stride) for axis in mesh._layout)


class KnownMeshes:
    """The meshes of stages that the user has spread: those of their own DTensors, and what `get_mesh` says."""

    def __init__(self, tensors: Iterable[Any], get_mesh: Callable[..., Any] | None) -> None:
        self._known = {mesh_key(each.device_mesh): each.device_mesh for each in tensors if isinstance(each, DTensor)}
        self._get_mesh = get_mesh

    def __call__(self, key: MeshKey) -> Any:
        mesh = self._known.get(key)
        if mesh is None and self._get_mesh is not None:
            names, axes = key
            mesh = self._get_mesh(names, _MeshLayout([_FlatLayout(*axis) for axis in axes]))
        if mesh is None:
            raise RunError(
                f"a DTensor came from another stage over a mesh with the axes {key[0]}, and this rank knows no such "
                f"mesh: none of its parameters is spread over one, and get_mesh "
                f"{'was not passed' if self._get_mesh is None else 'returned None'}; pass PipelineStage(get_mesh=)"
            )
        self._known[key] = mesh
        return mesh


def is_spread(module: nn.Module) -> bool:
    """Return whether the user has spread a stage, by `parallelize_module` say."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _packed(value: Tensor) -> Any:
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, AsyncCollectiveTensor):
        local = local.trigger_wait()  # type: ignore[no-untyped-call]  # what a collective will put there
    local = local.detach()
    if value.requires_grad:
        local.requires_grad_()
    if not isinstance(value, DTensor):
        return local
    placements, mesh = tuple(map(_text, value.placements)), mesh_key(value.device_mesh)
    return SpreadPart(local, placements, torch.Size(value.shape), tuple(value.stride()), mesh)


def _text(placement: Placement) -> tuple[Any, ...]:
    if placement.is_replicate():
        return ("R",)
    if type(placement) is Shard:
        return ("S", placement.dim)
    if isinstance(placement, Partial):
        return ("P", placement.reduce_op)
    raise ModelError(f"a tensor spread as {placement} cannot cross stages; redistribute it to Shard or Replicate")


def plain_parameters(stages: Mapping[int, Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that every rank of the axis holds whole, outside of DTensor's care."""
    for stage in stages.values():
        named = [(stage.part.names.get(name, name), parameter) for name, parameter in stage.module.named_parameters()]
        if isinstance(stage.holds, StageAndLoss):
            named += [(f"{LOSS}.{name}", parameter) for name, parameter in stage.holds.loss.named_parameters()]
        yield from ((name, parameter) for name, parameter in named if not isinstance(parameter, DTensor))
