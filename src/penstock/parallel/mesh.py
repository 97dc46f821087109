"""The axes that processes stand on: pp (the pipeline), dp (its replicas), tp (tensors spread over ranks).

One torch DeviceMesh with named axes says all of it. `mesh` makes one and shows the arithmetic where it does not
come out; a user's own mesh is taken as it is, if its axes have these names. `Axes` is what the rest of this package
reads of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.devices import accelerator, backends
from penstock.errors import UsageError
from penstock.parallel.group.joining import joining
from penstock.rules import is_count
from penstock.runtime.transport.distributed.transport import DistributedTransport

AXES = ("pp", "dp", "tp")
CALL = "mesh()"


def mesh(
    pp: int = 1, dp: int = 1, tp: int = 1, *, device: str | None = None, inner: Literal["dp", "pp"] = "dp"
) -> DeviceMesh:
    """Arrange all processes as a `DeviceMesh` of pp x dp x tp. One of the three may be -1: whatever is left.

    Neighbours along `tp` are neighbours in rank, then `dp`, then `pp`, so the ranks that communicate most are closest.

    Args:
        pp: Ranks per pipeline.
        dp: Replicas of the pipeline.
        tp: Processes that share the tensors of a stage.
        device: The type of device, such as `"cuda"`. By default, the accelerator if there is one, otherwise the CPU.
        inner: The axis after `tp`: `"dp"`, or `"pp"`, with which the ranks of a pipeline are closer than replicas.
    """
    if inner not in ("dp", "pp"):
        raise UsageError(f"inner={inner!r}: pass 'dp' or 'pp', the axis whose neighbours are closest after tp's")
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    for name, size in sizes.items():
        if not is_count(size) or (size < 1 and size != -1):
            raise UsageError(f"{name}={size!r}: pass a whole number of at least 1, or -1 for what is left")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UsageError(f"{' and '.join(f'{name}=-1' for name in open_axes)}: only one axis can take what is left")
    _start_world(sizes)
    world = dist.get_world_size()
    if open_axes:
        fixed = prod(size for size in sizes.values() if size != -1)
        if world % fixed:
            raise UsageError(f"{_product(sizes, open_axes)} = {fixed} does not divide the {world} processes there are")
        sizes[open_axes[0]] = world // fixed
    if prod(sizes.values()) != world:
        raise UsageError(
            f"{_product(sizes)} = {prod(sizes.values())} processes, but there are {world}; start "
            f"{prod(sizes.values())} of them, or pass sizes whose product is {world}"
        )
    kind = device or accelerator() or "cpu"
    order = AXES if inner == "dp" else ("dp", "pp", "tp")
    shape = tuple(sizes[name] for name in order)
    if dist.get_backend() != "gloo" or world == 1:
        return init_device_mesh(kind, shape, mesh_dim_names=order)
    return _watched_mesh(kind, shape, order)


def _watched_mesh(kind: str, shape: tuple[int, ...], order: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh, and name a process that is lost meanwhile.

    Torch connects the members of each axis in calls that name nobody. So all processes first meet by a transport, which
    names who is missing; what is lost after that is found within the group's timeout.
    """
    everybody = dist.group.WORLD
    assert everybody is not None
    limit = everybody._get_backend(torch.device("cpu")).options._timeout
    meeting = DistributedTransport(everybody, limit.total_seconds())
    meeting.call = CALL
    try:
        meeting.exchange(None)
    finally:
        meeting.close()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    override: Any = dict.fromkeys(order, ("gloo", options))
    store = dist.distributed_c10d._get_process_group_store(everybody)
    with joining(store, dist.get_rank(), dist.get_world_size(), f"mesh/{meeting.number}"):
        return init_device_mesh(kind, shape, mesh_dim_names=order, backend_override=override)


def _product(sizes: dict[str, int], left_out: list[str] | None = None) -> str:
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if name not in (left_out or ()))


def _start_world(sizes: dict[str, int]) -> None:
    if dist.is_initialized():
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        needed = prod(size for size in sizes.values() if size != -1)
        raise UsageError(
            f"{_product(sizes)} needs {needed} processes, but this process runs alone; start it with "
            f"torchrun --nproc-per-node {needed}, or leave mesh= out to run all ranks in one process"
        )
    dist.init_process_group(backends())


@dataclass(frozen=True)
class Axes:
    """What a mesh says about this process; without a mesh, one replica with whole tensors."""

    mesh: Any = None

    @classmethod
    def of(cls, mesh: Any, replicate: str | None) -> Axes:
        """Read a mesh, and refuse what would train replicas apart without a word."""
        found = cls(mesh)
        if mesh is None:
            if replicate is not None:
                raise UsageError(
                    f"replicate={replicate!r} needs mesh=, with an axis 'dp': penstock.mesh(pp=2, dp=2) under torchrun"
                )
            return found
        names = tuple(mesh.mesh_dim_names or ())
        if "pp" not in names:
            raise UsageError(f"the mesh has the axes {names}; name the pipeline's axis 'pp'")
        strange = [name for name in names if name not in AXES and mesh[name].size() > 1]
        if strange:
            raise UsageError(
                f"the mesh has the axes {names}, and a pipeline knows {AXES}; pass the part of it that is the "
                f"pipeline's, such as mesh['pp', 'dp']"
            )
        for place, name in enumerate(names):
            if not (mesh.mesh.diff(dim=place) > 0).all():
                raise UsageError(
                    f"along the mesh's axis {name!r} the processes do not stand in the order of their numbers "
                    f"({mesh.mesh.tolist()}), but torch orders the members of a group by them, so axes would "
                    f"contradict each other; list the processes in ascending order along every axis"
                )
        if replicate is not None and found.size("dp") == 1 and "dp" not in names:
            raise UsageError(f"replicate={replicate!r}, but the mesh has only the axes {names}; add an axis 'dp'")
        return found

    def size(self, axis: str) -> int:
        """Return how many ranks stand along an axis; 1 where there is none of that name."""
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return 1
        return int(self.mesh[axis].size())

    def index(self, axis: str) -> int:
        return 0 if self.size(axis) == 1 else int(self.mesh.get_local_rank(axis))
