"""How the arguments of a `Pipeline` become stages on ranks, in order: world, cut, schedule, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from penstock.devices import CPU, on_accelerator, to_device
from penstock.model.balance.request import Balancing
from penstock.model.cut import cut_model
from penstock.model.staged_model import StagedModel
from penstock.parallel.composition import Composition
from penstock.parallel.group.world import World
from penstock.pipeline.arguments import alike, first_count
from penstock.pipeline.choose_schedule import choose_schedule, searched_cut
from penstock.pipeline.deployment import Deployment, Programs
from penstock.pipeline.devices import devices_of_ranks, home_of, measuring_device
from penstock.runtime.batch.microbatch import plain_example
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.loss.module import loss_holding
from penstock.runtime.optim.precision import precision_of
from penstock.runtime.state.batch_norm import prepare_batch_norm, whole_stages
from penstock.runtime.state.randomness import StepCounter
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.schedule import Schedule, Topology


class Construction:
    """One pipeline on its way; `given` has the arguments of `Pipeline` by name."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = asked = SimpleNamespace(**given)
        self.composition = Composition(asked.mesh, asked.parallel_options)
        replicated = self.composition.replicate is not None
        self._count = first_count(asked.batch_options.split, asked.microbatches, asked.schedule, replicated)
        self.world = World.find(asked.group, asked.mesh, asked.transport, asked.timeout)
        self.measures = self.world.is_first and self.composition.is_first  # whether this process measures for all
        self._precision = precision_of(asked.precision)
        self._settings = {
            **alike(given),
            "transport": self.world.requested_transport or "no choice",
            "precision": str(self._precision or "the caller's"),
        }
        speeds = asked.cut_options.speeds
        self._searched = searched_cut(asked.schedule, asked.balance, self._count, asked.ranks, self.world, speeds)

    def _choose(self, topology: Topology, count: int | None) -> Schedule:
        found = None if self._searched is None else self._searched.schedule(count)
        schedule = self._given.schedule if found is None else found
        return choose_schedule(schedule, topology, count, self._given.ranks, self.world)

    def _agree(self, numbers: list[float]) -> list[float]:
        """Return the numbers of the one process that measures, in all of them."""
        with self.world.meeting() as transport:
            return numbers if transport is None else self.composition.first_says(numbers, transport)

    def cut(self) -> StagedModel:
        asked, composition = self._given, self.composition
        batch_norm = asked.batch_options.batch_norm
        group = composition.norm_group(batch_norm, asked.batch_options.batch_norm_group)
        prepare_batch_norm(asked.model, batch_norm, group)
        cut = cut_model(
            asked.model,
            asked.stages,
            balance=Balancing(
                asked.balance,
                asked.cut_options.speeds,
                asked.cut_options.optimizer,
                schedule_for=lambda stages: self._choose(Topology.chain(stages), self._count),
                agree=self._agree,
                measures=self.measures,
                device=measuring_device(asked.devices, self._modules, self.world),
                search=None if self._searched is None else self._searched.cuts,
            ),
            example=self._example(),
            split_at=asked.split_at,
            options=asked.cut_options,
        )
        return replace(cut, loss=loss_holding(asked.loss_fn, cut))

    @property
    def _modules(self) -> Sequence[nn.Module]:
        model = self._given.model
        return model if isinstance(model, Sequence) else [model]

    def _example(self) -> Any:
        """Return the example without marks, on the device where the model is."""
        home = home_of(self._modules)
        return to_device(plain_example(self._given.example), home if on_accelerator(home) else None)

    def deploy(self, staged: StagedModel) -> Deployment:
        """Lay the stages out on their ranks, with the programs that run them."""
        asked, composition = self._given, self.composition
        composition.look_at(staged.parts)
        chosen = self._choose(staged.topology, self._count)
        programs = Programs(
            chosen,
            lambda count: self._choose(deployment.staged.topology, count),
            composition.lowered,
            lambda always: whole_stages(staged.parts, always=always),
        )
        counter = StepCounter(torch.initial_seed() if asked.seed is None else asked.seed)
        places = devices_of_ranks(asked.devices, staged, chosen.placement, self.world)
        self._take_device(places)
        transports = self.world.transports(chosen.ranks, places)
        if isinstance(self.world.transport, DistributedTransport):
            composition.name_axes(self.world.transport)
        local = LocalRanks(staged, chosen.placement, transports, counter, places)
        local.precision = self._precision
        local.keeps_casts = composition.replicate != "fsdp"
        deployment = Deployment(self.world, staged, programs, local, counter, places, self._settings)
        return deployment

    def _take_device(self, places: Mapping[int, torch.device]) -> None:
        if self.world.size is None:
            return
        device = next(iter(places.values()), CPU)
        if on_accelerator(device):
            torch.accelerator.set_device_index(device.index)
