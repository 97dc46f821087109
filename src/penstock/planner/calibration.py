"""A cluster's efficiency from a run: the one number under which the run's own step time is predicted.

Everything else of a cluster is stated (peak, memory, links), so a run on a few devices calibrates plans for many.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.checkpoint.disk.plain_files import read_plain
from penstock.errors import UsageError
from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster, Device
from penstock.planner.layout import MeshLayout
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile
from penstock.schedule import Schedule, Timeline, family
from penstock.train.config.consistent import processes_of, stages_of
from penstock.train.config.read import checked
from penstock.train.config.settings import TrainConfig
from penstock.train.run.account import optimizer_states
from penstock.train.run.run_folder import RunFolder

STEPS = 60  # how often the range of efficiencies is halved
SKIPPED = 3  # steps of a run in which libraries are still being loaded


@dataclass(frozen=True)
class RecordedRun:
    """What a run's folder says of it."""

    folder: Path
    config: TrainConfig
    seconds: float  # the median step
    spread: float  # half of the middle 80 % of steps, as a share of the median
    memory: list[dict[str, Any]]
    timeline: Timeline | None

    @property
    def layout(self) -> MeshLayout:
        mesh = self.config.mesh
        return MeshLayout(
            self.config.pipeline.ranks, mesh.replicas, mesh.tp, sharded=mesh.replicate == "fsdp" and mesh.replicas > 1
        )


def read_run(path: str | Path) -> RecordedRun:
    """Read the folder of a run that `penstock train` has made."""
    root = Path(path)
    folder = RunFolder(root)
    try:
        document = json.loads(read_plain(root / "config.json"))
        config = checked(TrainConfig, document, str(root / "config.json"))
        lines = [json.loads(line) for line in read_plain(folder.metrics).splitlines()]
    except FileNotFoundError as error:
        raise UsageError(
            f"{root} is not the folder of a run that has trained: there is no {Path(str(error.filename)).name}"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{root}: {error}") from None
    times = sorted(line["seconds"] for line in lines[SKIPPED:] if line.get("seconds"))
    if not times:
        raise UsageError(f"{root} has {len(lines)} steps; {SKIPPED + 1} or more tell what a step takes")
    middle = statistics.median(times)
    tenth = len(times) // 10
    memory = json.loads(read_plain(folder.memory)) if folder.memory.is_file() else []
    timeline = Timeline.load(folder.timeline) if folder.timeline.is_file() else None
    spread = (times[-1 - tenth] - times[tenth]) / 2 / middle
    return RecordedRun(root, config, middle, spread, memory, timeline)


def candidate_of(
    config: TrainConfig, profile: Profile, cluster: Cluster, counts: list[int] | None = None
) -> PlanCandidate:
    """What a configuration runs, as a candidate with a price."""
    mesh, pipeline = config.mesh, config.pipeline
    layout = MeshLayout(pipeline.ranks, mesh.replicas, mesh.tp, sharded=mesh.replicate == "fsdp" and mesh.replicas > 1)
    rows = max(1, config.data.batch // config.training.accumulate // mesh.replicas // pipeline.microbatches)
    pricing = Pricing(profile, cluster, layout, rows)
    stages = stages_of(config)
    balance = counts or (pipeline.balance if isinstance(pipeline.balance, list) else None)
    cuts = pricing.cut(stages) if balance is None else _places(profile, balance)
    if pipeline.split_at:
        names = [unit.name for unit in profile.one]
        cuts = tuple(names.index(name) for name in pipeline.split_at if name in names)
    if cuts is None or len(cuts) != stages - 1:
        raise UsageError(f"the model has too few pieces for {stages} stages (pipeline.stages)")
    if pipeline.schedule.endswith((".csv", ".json")):
        name = Schedule.load(Path(pipeline.schedule)).name or "1f1b"
    else:
        name = family(pipeline.schedule).name
    recompute = pipeline.recompute != "never"
    return PlanCandidate(
        pricing, name, stages // pipeline.ranks, pipeline.microbatches, recompute, tuple(cuts), optimizer_states(config)
    )


def _places(profile: Profile, counts: list[int]) -> tuple[int, ...]:
    named = [number for number, unit in enumerate(profile.one) if unit.name]
    starts, total = [], 0
    for count in counts[:-1]:
        total += count
        starts.append(named[total])
    return tuple(starts)


def calibrate(cluster: Cluster, profile: Profile, config: TrainConfig, seconds: float, passes: int = 1) -> Cluster:
    """The cluster with the efficiency at which a step of `config` takes `seconds`."""

    def predicted(efficiency: float) -> float:
        candidate = candidate_of(config, profile, cluster.at(efficiency))
        return candidate.seconds + (passes - 1) * candidate.priced[0]

    low, high = 1e-4, 1.0
    if predicted(high) > seconds:
        raise UsageError(
            f"a step took {seconds:.4g} s, but would take {predicted(high):.4g} s if every product ran at the device's "
            f"peak of {cluster.device.peak:.3g} FLOP/s (device.peak); state a higher peak, or faster memory and links"
        )
    for _ in range(STEPS):
        middle = (low + high) / 2
        if predicted(middle) > seconds:
            low = middle
        else:
            high = middle
        if high - low < 1e-4 * high:
            break
    return cluster.at(high)


def from_run(run: RecordedRun, profile: Profile, cluster: Cluster) -> Cluster:
    """A cluster calibrated by a run; its error bar is the spread of the run's steps, 5 % at least."""
    found = calibrate(cluster, profile, run.config, run.seconds, run.config.training.accumulate)
    return replace(found, error=min(1.0, max(0.05, run.spread)))


def cluster_of(run: RecordedRun, memory: float, peak: float) -> Cluster:
    """Where a run was, if no cluster is stated: this machine, each process with its share of the memory."""
    processes = processes_of(run.config)
    kinds = ("weights", "gradients", "optimizer", "activations")
    alone = [each["process"] - sum(each[kind] or 0.0 for kind in kinds) for each in run.memory]
    device = Device(memory=memory / processes, peak=peak, reserved=max(alone, default=5e8), holds_checkpoints=True)
    return Cluster(name=f"as {run.folder}", hosts=1, devices=processes, device=device)
