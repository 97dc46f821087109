"""A model laid out on ranks, and its schedules: what `Pipeline` hands to its parts, so that each sees the same.

A schedule is for one number of microbatches. Where the number follows from the batch, each number that comes up has a
schedule of the same family, built and proved when it is first met. Where the order follows from the sizes of a batch's
microbatches, each new batch has a schedule of its own, proved as well; the last few are kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.moved import move_together
from penstock.model.staged_model import Holding, StagedModel
from penstock.parallel.group.facts import facts_of
from penstock.parallel.group.world import World
from penstock.runtime.engine.foreign_leaves import watch_leaves
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.engine.replication import Replication
from penstock.runtime.loss.module import constants_of, loss_holding
from penstock.runtime.optim.tied import TiedParameters
from penstock.runtime.state.randomness import StepCounter
from penstock.schedule import Placement, Schedule, verify
from penstock.schedule.builders import forward_program
from penstock.schedule.lowering.gather import gather, in_turn
from penstock.tool import tool

KEPT = 16  # schedules made for sizes
Sizes = tuple[int, ...]


class _Proved(NamedTuple):
    schedule: Schedule
    program: Schedule


class Programs:
    """`choose` gives the schedule for a number of microbatches, `lower` adds transfers and reductions to it.

    `gathering` are the stages that take their batch in one piece, in training, and (True) also in inference.
    """

    def __init__(
        self,
        schedule: Schedule,
        choose: Callable[[int], Schedule],
        lower: Callable[[Schedule], Schedule],
        gathering: Callable[[bool], Collection[int]],
    ) -> None:
        self._choose, self._lower, self._gathering = choose, lower, gathering
        self._inference: dict[int, Schedule] = {}
        self._training: dict[int, _Proved] = {}
        self._sized: dict[Sizes, _Proved] = {}
        self._take(self._counted(schedule.microbatches, schedule))

    def _take(self, proved: _Proved) -> bool:
        """Run these from here on; return whether they are others than before."""
        changed = proved.schedule is not getattr(self, "schedule", None)
        self.schedule, self.program = proved
        self.microbatches = proved.schedule.microbatches
        return changed

    def _counted(self, count: int, schedule: Schedule | None = None) -> _Proved:
        if count not in self._training:
            self._training[count] = self._prove(self._choose(count) if schedule is None else schedule)
        return self._training[count]

    def _prove(self, schedule: Schedule) -> _Proved:
        gathering = self._gathering(False)
        ordered = in_turn(schedule, gathering)
        program = gather(self._lower(ordered), gathering)
        verify(program)
        return _Proved(ordered, program)

    def successor(self, schedule: Schedule, gathering: Callable[[bool], Collection[int]]) -> Programs:
        """Return the programs of another cut of the same model."""
        return Programs(schedule, self._choose, self._lower, gathering)

    def take(self, count: int, sizes: Sizes | None = None) -> bool:
        """Give training steps that many microbatches from here on; return whether the schedule is another than before.

        With `sizes`, one for each microbatch, their order is the best that was found for these.
        """
        proved = self._counted(count)
        if sizes is None or self._gathering(False):
            return self._take(proved)
        if sizes not in self._sized:
            searching = tool("penstock.tools.search", "an order for the sizes of a batch's microbatches")
            ordered: Schedule = searching.order_microbatches(proved.schedule, sizes)
            self._sized[sizes] = proved if ordered is proved.schedule else self._prove(ordered)
            while len(self._sized) > KEPT:
                del self._sized[next(iter(self._sized))]
        return self._take(self._sized[sizes])

    def inference(self, count: int, lower: Callable[[Schedule], Schedule]) -> Schedule:
        """Return the program of an evaluation with that many microbatches; `lower` adds what sharded stages need."""
        if count not in self._inference:
            program = lower(gather(forward_program(self.schedule, count), self._gathering(True)))
            verify(program)
            self._inference[count] = program
        return self._inference[count]


@dataclass
class Deployment:
    """The stages, the programs that run them, and the ranks; a new cut replaces the stages and the ranks."""

    world: World
    staged: StagedModel
    programs: Programs
    ranks: LocalRanks
    counter: StepCounter
    devices: dict[int, torch.device]
    settings: dict[str, str]  # What all ranks must have been given alike.
    replication: Replication = field(default_factory=Replication)
    tied: TiedParameters = field(init=False)

    @property
    def schedule(self) -> Schedule:
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
        local = self.ranks.executors
        return [each for each in self.staged.holdings() if self.placement.rank_of(each.stage) in local]

    def facts(self) -> dict[str, tuple[str, str]]:
        """Return the facts about model, schedule and settings that must be equal on every rank."""
        return facts_of(self.schedule, self.staged, self.settings)

    def follow_cut(self, tied: Sequence[Sequence[tuple[int, str]]], loss_fn: Callable[..., Any] | None) -> None:
        """Set up what follows from a cut; `tied` has groups of (stage, name) that are one parameter."""
        self.tied = TiedParameters(self.staged, self.placement, self.world.transport, tied)
        self.follow_loss(loss_fn)

    def follow_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        """Move a loss's constants to the last stage; on processes, refuse a loss that has parameters of other ranks."""
        last = self.placement.rank_of(self.staged.stages - 1)
        device, module = self.devices.get(last), constants_of(loss_fn)
        if device is not None and module is not None and last in self.ranks.executors:
            module.to(device)
        if self.world.transport is not None:
            (executor,) = self.ranks.executors.values()
            replicated = self.replication.replicas > 1
            watch_leaves(executor.stages, self.staged, self.placement, loss_fn, replicated)

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
        """Move the local stages to where they belong."""
        there: dict[torch.device, list[nn.Module]] = {}
        homes: dict[int, tuple[int, torch.device]] = {}  # Of parameters: the stage that was seen first, and its device.
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
