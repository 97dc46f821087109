"""A model laid out on ranks: what `Pipeline` hands to its parts, so that each sees the same one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from penstock.group.world import World
from penstock.model.staged_model import Holding, StagedModel
from penstock.optim.tied import TiedParameters
from penstock.pipeline.programs import Programs
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.engine.replication import Replication
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

    def put_on_devices(self) -> None:
        """The local stages go where they belong."""
        for holding in self.holdings():
            device = self.devices.get(self.placement.rank_of(holding.stage))
            if device is not None:
                holding.module.to(device)
