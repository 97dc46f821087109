"""Where a pipeline runs: all ranks in this process, or this process as one rank of a group.

Decided once, from what the user passed and from the environment, so that the same script runs
on a laptop and under torchrun. On processes the ranks make sure, before the first step, that
they were all given the same pipeline: a difference that would otherwise show as a hang or as
wrong numbers is an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ModelError, UsageError
from penstock.runtime.transport import Channel, ThreadTransport, Transport
from penstock.runtime.transport.distributed import DistributedTransport

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["World"]

TRANSPORTS = ("threads", "distributed")


class World:
    """`size` is the number of processes, or None where ranks are threads."""

    def __init__(self, group: Any, size: int | None, timeout: float) -> None:
        self.group = group
        self.size = size
        self.timeout = timeout
        self._transport: Transport | None = None

    @property
    def kind(self) -> str:
        """What the ranks are, in words."""
        return "threads of this process" if self.size is None else f"{self.size} processes"

    @property
    def wire(self) -> str:
        """What carries values between ranks, in words."""
        if self.size is None:
            return "handed over in memory, without a copy"
        return f"torch.distributed ({dist.get_backend(self.group)})"

    @classmethod
    def find(cls, group: Any, mesh: Any, transport: str | None, timeout: float) -> World:
        """Read the arguments, then the environment."""
        if transport not in (None, *TRANSPORTS):
            raise UsageError(
                f"transport={transport!r}: choose one of {', '.join(map(repr, TRANSPORTS))}, or leave it out"
            )
        if group is not None and mesh is not None:
            raise UsageError("pass group= or mesh=, not both")
        if mesh is not None:
            names = mesh.mesh_dim_names or ()
            if "pp" not in names:
                raise UsageError(f"the mesh has the axes {tuple(names)}; name the pipeline's axis 'pp'")
            group = mesh.get_group("pp")
        if transport == "threads":
            if group is not None:
                raise UsageError("transport='threads' runs all ranks in this process; it takes no group= or mesh=")
            return cls(None, None, timeout)
        if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if group is None and dist.is_initialized() and (dist.get_world_size() > 1 or transport == "distributed"):
            group = dist.group.WORLD
        if group is None:
            if transport == "distributed":
                raise UsageError("transport='distributed' needs a process group: start with torchrun, or pass group=")
            return cls(None, None, timeout)
        return cls(group, dist.get_world_size(group), timeout)

    def check_ranks(self, wanted: int, asked: int | None) -> None:
        """The schedule's ranks must be the processes there are."""
        if self.size is not None and wanted != self.size:
            said = f"ranks={asked}" if asked else f"the schedule needs {wanted} ranks"
            raise UsageError(f"{said}, but the group has {self.size} processes; start torchrun with {wanted} processes")

    def transports(self, ranks: int, devices: Sequence[torch.device | str] | None) -> Sequence[Transport]:
        """One transport for each rank that lives in this process."""
        if devices is not None and len(devices) != ranks:
            raise UsageError(f"{len(devices)} devices for {ranks} ranks; pass one for each rank")
        if self.size is None:
            return ThreadTransport.group(ranks, timeout=self.timeout, devices=devices)
        rank = dist.get_rank(self.group)
        self._transport = DistributedTransport(
            self.group,
            self.timeout,
            coordinator=ranks - 1,
            device=None if devices is None else devices[rank],
        )
        return [self._transport]

    def agree(self, pipe: Pipeline) -> None:
        """On processes: the same schedule, stages, options and seed everywhere."""
        if self._transport is None:
            return
        _check_tied(pipe)
        shapes = [
            [(part.names.get(name, name), tuple(value.shape)) for name, value in part.module.state_dict().items()]
            for part in pipe.split.parts
        ]
        mine = {
            "schedule": (pipe.schedule.name, pipe.schedule.rows),
            "stages' parameters": shapes,
            "recompute": pipe.recompute,
            "inputs": pipe.inputs,
        }
        told = self._transport.exchange(({name: _digest(value) for name, value in mine.items()}, pipe.clock.seed))
        for rank, (theirs, _) in enumerate(told):
            for name in mine:
                if theirs[name] != told[0][0][name]:
                    raise UsageError(f"rank {rank} was given another {name} than rank 0; pass the same on every rank")
        pipe.clock.seed = told[0][1]

    def same_count(self, pipe: Pipeline, count: int | None) -> int:
        """How many microbatches an evaluation has: what the ranks that see the batch say."""
        if self._transport is None:
            return count if count is not None else pipe.microbatches
        told = [(rank, other) for rank, other in enumerate(self._transport.exchange(count)) if other is not None]
        if len({other for _, other in told}) > 1:
            raise ModelError(f"the ranks were given batches of different size (rank, microbatches): {told}")
        return told[0][1] if told else pipe.microbatches

    def join_norms(self, local: Tensor, norm_type: float) -> Tensor:
        """The norm of all ranks' gradients together, from the norm of each."""
        if self._transport is None:
            return local
        norms = torch.tensor(self._transport.exchange(local.item()), dtype=torch.float64)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total.to(local.dtype)

    def carry(
        self,
        pipe: Pipeline,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """inputs='first': what later ranks need goes to them straight from the first stage's rank."""
        transport = self._transport
        placement = pipe.schedule.placement
        home = placement.rank_of(0)
        if transport is None or placement.ranks == 1:
            return args, kwargs, target, loss_kwargs
        if transport.rank != home and (args or kwargs or target is not None):
            raise UsageError(
                f"inputs='first': only rank {home} passes a batch to step(); rank {transport.rank} did too"
            )
        channels = [
            Channel(-1, placement.stages_of(rank)[0], "F", home, rank)
            for rank in range(placement.ranks)
            if rank != home
        ]
        transport.open(channels)
        if transport.rank == home:
            for number, channel in enumerate(channels):
                transport.send(number, 0, _needed(pipe, channel.target_rank, kwargs, target, loss_kwargs))
            transport.flush()
            return args, kwargs, target, loss_kwargs
        number = next(number for number, channel in enumerate(channels) if channel.target_rank == transport.rank)
        named, goal, extra = transport.receive(number, 0)
        return (), named, goal, extra


def _needed(pipe: Pipeline, rank: int, kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any]) -> Any:
    stages = pipe.schedule.placement.stages_of(rank)
    takes = [pipe.split.parts[stage].takes for stage in stages]
    named = {name: value for name, value in kwargs.items() if any(known is None or name in known for known in takes)}
    if pipe.split.stages - 1 in stages:
        return named, target, dict(loss_kwargs)
    return named, None, {}


def _digest(value: Any) -> str:
    import hashlib

    return hashlib.sha256(repr(value).encode()).hexdigest()


def _check_tied(pipe: Pipeline) -> None:
    """A parameter on two ranks would drift apart in silence."""
    owners: dict[int, tuple[int, str]] = {}
    for index, part in enumerate(pipe.split.parts):
        rank = pipe.schedule.placement.rank_of(index)
        for name, parameter in part.module.named_parameters():
            first = owners.setdefault(id(parameter), (rank, part.names[name]))
            if first[0] != rank:
                raise ModelError(
                    f"{first[1]} and {part.names[name]} are one parameter on ranks {first[0]} and {rank}, which would "
                    f"drift apart; put both stages on one rank (a V schedule does so for the first and the last)"
                )
