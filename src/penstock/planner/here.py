"""Costs measured on this machine: every layout is run for a few steps, on processes, as training would run it.

Processes that compute at the same time share caches, memory and sometimes cores, so a layer that is measured alone says
little. Here all ranks run: a few microbatches through the real stages, recorded, for each layout, number of stages and
size of microbatches, once with whole backwards and once with split ones. Schedules and numbers of microbatches that
were not run follow from these costs by simulation. Settings take turns, so that what disturbs a round disturbs all.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from penstock.devices import free_memory
from penstock.errors import RunError
from penstock.parallel.mesh import mesh as make_mesh
from penstock.pipeline import Pipeline
from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster, Device
from penstock.planner.layout import MeshLayout
from penstock.planner.price import Pricing, StageCosts
from penstock.planner.profile import Profile
from penstock.planner.writing import run_config
from penstock.reading import read_json
from penstock.schedule import Costs, simulate
from penstock.tools.train.build import build_model, build_pipeline
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import libraries_of, searching_no_working_folder
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.loss import shares_of
from penstock.tools.train.run.baseline import process_bytes
from penstock.tools.train.run.flops import peak_flops
from penstock.tools.train.updates.optimizer import build_optimizer

COMPUTES = ("forward", "input", "weight")
ROUNDS, WARM_UP = 7, 2
OPEN = 8  # Pipelines that take turns.
ERROR = 0.05  # The error of predictions, at least.


@dataclass(frozen=True)
class MeasuredSetting:
    """What is measured: everything but the schedule's order and its number of microbatches."""

    layout: MeshLayout
    rows: int
    cuts: tuple[int, ...]
    counts: tuple[int, ...]  # Modules of each stage.
    names: tuple[str, ...] | None  # Modules that stages 1, 2, ... begin with; None: cut by counts.
    split: bool  # Backwards come as I and W.

    @classmethod
    def of(cls, candidate: PlanCandidate) -> MeasuredSetting:
        """Return what a candidate needs to have measured."""
        pricing, cuts = candidate.pricing, candidate.cuts
        profile = pricing.profile
        names = None if profile.by_position else profile.names_of(cuts)
        return cls(candidate.layout, pricing.rows, cuts, profile.counts_of(cuts), names, candidate.split)

    @property
    def family(self) -> str:
        """A schedule that shows the costs."""
        if len(self.counts) > self.layout.pp:
            return "interleaved-zb" if self.split else "interleaved-1f1b"
        return "zb-h1" if self.split else "1f1b"

    @property
    def microbatches(self) -> int:
        """How many are run."""
        return max(4, 2 * self.layout.pp)

    @property
    def key(self) -> tuple[MeshLayout, int, tuple[int, ...], bool]:
        return self.layout, self.rows, self.cuts, self.split


def settings_of(candidates: Iterable[PlanCandidate]) -> list[MeasuredSetting]:
    """Return what candidates need to have measured, each setting once."""
    return list({setting.key: setting for setting in map(MeasuredSetting.of, candidates)}.values())


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of one setting."""

    costs: Costs
    around: float  # Seconds of a step beside its pipeline.
    spread: float  # How far steps differ, as a share.


class MeasuredPricing(Pricing):
    """Prices with times that were measured; bytes are counted as ever."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        layout: MeshLayout,
        rows: int,
        known: dict[Any, MeasuredCosts] | None = None,
    ) -> None:
        super().__init__(profile, cluster, layout, rows)
        self.known = known or {}

    @property
    def work(self) -> float:
        return 0.0  # Only stages are measured.

    def cut(self, stages: int) -> tuple[int, ...] | None:
        cuts = super().cut(stages)
        if cuts is not None and self.known and not any(self.measured(cuts, split) for split in (False, True)):
            return None  # It was not run.
        return cuts

    def shares(self, cuts: tuple[int, ...], split: bool) -> dict[str, float]:
        return {"computing": sum(each.forward + each.input + each.weight for each in self.stages(cuts, split))}

    def measured(self, cuts: Sequence[int], split: bool) -> MeasuredCosts | None:
        return self.known.get((self.layout, self.rows, tuple(cuts), split))

    def stages(self, cuts: tuple[int, ...], split: bool) -> list[StageCosts]:
        found, counted = self.measured(cuts, split), super().stages(cuts, split)
        if found is None:
            return counted
        key = "stages", cuts, split
        if key not in self.shared:
            times = (found.costs.per_stage(name, len(counted)) for name in COMPUTES)
            self.shared[key] = [
                replace(each, forward=forward, again=forward, input=backward, weight=weight)
                for each, forward, backward, weight in zip(counted, *times, strict=True)
            ]
        measured: list[StageCosts] = self.shared[key]
        return measured


def this_machine(config: TrainConfig, code: Sequence[str] = (), devices: int | None = None) -> Cluster:
    """Describe this machine as a cluster: a device per core, or as many as asked for, with its share of the memory.

    `code` are the modules of libraries that the model is from.
    """
    count = devices or len(os.sched_getaffinity(0))
    # Any layout may be chosen, so what torch loads for replicas and tensor parallelism counts where there are several.
    spread = replace(config, mesh=replace(config.mesh, replicas=2 if count > 1 else 1))
    reserved = float(process_bytes(libraries_of(config), code, spread))
    device = Device(memory=free_memory() / count, reserved=reserved, holds_checkpoints=True)
    return Cluster(name="this machine", hosts=1, devices=count, device=device, error=ERROR)


def measure(
    config: TrainConfig, settings: Sequence[MeasuredSetting], rounds: int = ROUNDS
) -> tuple[dict[Any, MeasuredCosts], float]:
    """Run every setting on as many processes as its layout has: their costs by key, and FLOP/s of a process at most."""
    if not settings:
        return {}, 1e12
    world = settings[0].layout.world
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        threads = max(1, len(os.sched_getaffinity(0)) // world)
        arguments = (world, threads, str(path), config, list(settings), rounds)
        with searching_no_working_folder():
            running = spawn(_rank, arguments, nprocs=world, join=False, daemon=True)  # type: ignore[no-untyped-call]
        try:
            while not running.join():
                pass
        except ProcessRaisedException as error:
            raise RunError(f"a layout could not be measured here: {str(error).strip().splitlines()[-1]}") from None
        finally:
            for process in running.processes:
                process.terminate()  # This does nothing where it has ended.
                process.join()
        found, peak = read_json(path / "measured.json", list)
    costs = [MeasuredCosts(Costs(**each["costs"]), each["around"], each["spread"]) for each in found]
    return dict(zip((setting.key for setting in settings), costs, strict=True)), peak


def _rank(rank: int, world: int, threads: int, folder: str, config: Any, settings: Any, rounds: int) -> None:
    """Measure as one process: all settings in groups, those of a group in turn."""
    torch.set_num_threads(threads)
    meeting: Any = {"init_method": f"file://{folder}/rendezvous", "timeout": timedelta(seconds=300)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **meeting)
    found, peak = [], 0.0
    batch = open_data(config).first()
    for first in range(0, len(settings), OPEN):
        with ExitStack() as stack:
            runs = [TimedPipeline(config, setting, batch, stack) for setting in settings[first : first + OPEN]]
            turns: dict[TimedPipeline, list[tuple[Costs, float]]] = {run: [] for run in runs}
            for number in range(WARM_UP + rounds):
                peak = max(peak, (peak_flops(config) or (1e12, ""))[0])
                for run in (*runs[number % len(runs) :], *runs[: number % len(runs)]):
                    turns[run].append(run.turn())
            found += [run.measured(turns[run][WARM_UP:]) for run in runs]
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(([asdict(each) for each in found], peak)))
    dist.barrier()
    dist.destroy_process_group()


class TimedPipeline:
    """The pipeline of one setting, with its optimizer, ready to be timed.

    The schedule and its number of microbatches are those of the setting, unless others are asked for.
    """

    def __init__(
        self,
        config: TrainConfig,
        setting: MeasuredSetting,
        batch: DataBatch,
        stack: ExitStack,
        family: str | None = None,
        microbatches: int | None = None,
    ) -> None:
        layout, count = setting.layout, microbatches or setting.microbatches
        self.setting, rows = setting, setting.rows * count * layout.dp
        chosen: Any = {"schedule": family or setting.family, "microbatches": count}
        config = run_config(config, layout, setting.counts, setting.names, **chosen)
        config = replace(config, data=replace(config.data, batch=rows))
        model, loss = build_model(config)
        mesh = make_mesh(layout.pp, layout.dp, layout.tp) if layout.dp * layout.tp > 1 else None
        # Those of the batch again and again, until there are so many.
        every = batch.with_rows(lambda tensor: tensor[torch.arange(rows, device="cpu") % len(tensor)])
        own = every.share(0 if mesh is None else mesh.get_local_rank("dp"), layout.dp)
        pipe = build_pipeline(
            config, model, loss, own, ranks=layout.pp, mesh=mesh, values=lambda _, tensor: tensor.zero_()
        )
        self.pipe: Pipeline = stack.enter_context(pipe)
        self.optimizer = build_optimizer(config, self.pipe)
        self.clip = config.optimizer.clip
        (kwargs,) = shares_of(pipe.loss_fn, [every.target])
        self.call = partial(pipe.step, *own.args, target=own.target, loss_kwargs=kwargs, **own.kwargs)

    def turn(self) -> tuple[Costs, float]:
        """Return the costs that a recorded step shows, and the seconds of another; caches are warm, as within a run."""
        self.train()
        with self.pipe.record() as timeline:
            self.train()
        return Costs.from_timeline(timeline), self.seconds()

    def seconds(self) -> float:
        """Time a step, from a barrier to the last rank's end."""
        dist.barrier()
        began = time.perf_counter()
        self.train()
        dist.barrier()
        return time.perf_counter() - began

    def train(self) -> None:
        """Train a step with its update."""
        self.call()
        if self.clip is not None:
            self.pipe.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pipe.zero_grad()

    def measured(self, turns: Sequence[tuple[Costs, float]]) -> MeasuredCosts:
        """Return the medians of some turns."""
        stages, middle = len(self.setting.counts), dict[str, Any]()
        for name in COMPUTES:
            columns = zip(*(costs.per_stage(name, stages) for costs, _ in turns), strict=True)
            middle[name] = [statistics.median(column) for column in columns]
        costs = Costs(**middle, hop=statistics.median(costs.hop for costs, _ in turns))
        step = statistics.median(seconds for _, seconds in turns)
        around = max(0.0, step - simulate(self.pipe.schedule, costs).makespan)
        return MeasuredCosts(costs, around, statistics.median(abs(seconds / step - 1) for _, seconds in turns))
