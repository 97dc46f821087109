"""A model laid out on ranks: what `Pipeline` hands to its parts, so that each sees the same one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.moved import move_together
from penstock.model.staged_model import Holding, StagedModel
from penstock.parallel.group.world import World
from penstock.pipeline.programs import Programs
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.engine.replication import Replication
from penstock.runtime.loss.module import loss_holding
from penstock.runtime.optim.tied import TiedParameters
from penstock.runtime.state.randomness import StepCounter
from penstock.schedule import Placement, Schedule


@dataclass
class Deployment:
    """The stages, the programs that run them, and the ranks; a new cut replaces the stages and the ranks."""

    world: World
    staged: StagedModel
    programs: Programs
    ranks: LocalRanks
    counter: StepCounter
    devices: dict[int, torch.device]
    replication: Replication = field(default_factory=Replication)
    tied: TiedParameters = field(init=False)

    @property
    def schedule(self) -> Schedule:
        """The schedule that training steps run now."""
        return self.programs.schedule

    @property
    def placement(self) -> Placement:
        """Which rank has which stage; the same for every number of microbatches."""
        return self.programs.schedule.placement

    @property
    def cores(self) -> int:
        """Cores that the ranks of this host share; 0 where stages are on other devices, or processes are pinned."""
        if any(each.device.type != "cpu" for holding in self.holdings() for each in holding.module.parameters()):
            return 0
        own = len(os.sched_getaffinity(0))
        pinned = self.world.transport is not None and own == 1 < (os.cpu_count() or 1)
        return 0 if pinned else own

    def holdings(self) -> list[Holding]:
        """What the stages of this process hold."""
        local = self.ranks.executors
        return [each for each in self.staged.holdings() if self.placement.rank_of(each.stage) in local]

    def hold_loss(self, loss_fn: Callable[..., Any] | None) -> bool:
        """Take what this loss holds beside the last stage, in the place of what another one held, if either does."""
        before, after = self.staged.loss, loss_holding(loss_fn, self.staged)
        modules = [None if each is None else each.module for each in (before, after)]
        if modules[0] is modules[1]:
            return False
        if type(self.replication) is not Replication:
            raise UsageError(
                "this loss or the one before has parameters or buffers, and a pipeline with replicas, sharded or "
                "spread tensors keeps those that it was made with; make a new Pipeline with loss_fn="
            )
        self.staged = replace(self.staged, loss=after)
        for executor in self.ranks.executors.values():
            for stage in executor.stages.values():
                if stage.is_last:
                    stage.hold(modules[1])
        self.put_on_devices()
        return True

    def put_on_devices(self) -> None:
        """The local stages go where they belong."""
        there: dict[torch.device, list[nn.Module]] = {}
        homes: dict[int, tuple[int, torch.device]] = {}  # by parameter: the stage that was seen with it, and its device
        for holding in self.holdings():
            device = self.devices.get(self.placement.rank_of(holding.stage))
            if device is None:
                continue
            there.setdefault(device, []).append(holding.module)
            for name, parameter in holding.module.named_parameters():
                stage, home = homes.setdefault(id(parameter), (holding.stage, device))
                if home != device:
                    raise UsageError(
                        f"{holding.names.get(name, name)} is one parameter of stages {stage} and {holding.stage}, "
                        f"whose ranks are threads on {home} and {device}; start a process for each rank (torchrun), "
                        f"which adds up the gradients of both, or give these ranks one device: devices=[...]"
                    )
        for device, modules in there.items():
            move_together(modules, device)
