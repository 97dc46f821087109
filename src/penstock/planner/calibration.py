"""A cluster's efficiency from a run: the one number under which the run's own step time is predicted.

Everything else of a cluster is stated (peak, memory, links), so a run on a few devices calibrates plans for many.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from penstock.devices import free_memory
from penstock.errors import ScheduleError, UsageError
from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster, Device
from penstock.planner.layout import MeshLayout
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile
from penstock.reading import parse_json, read_json, read_text
from penstock.rules import is_float
from penstock.schedule import Schedule, Timeline, family
from penstock.schedule.builders import is_auto
from penstock.tools.train.config.consistent import check_model, is_schedule_file, processes_of, stages_of
from penstock.tools.train.config.read import read_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.flops import peak_flops
from penstock.tools.train.run.memory import KINDS, optimizer_states
from penstock.tools.train.run.metrics import MOST_METRICS
from penstock.tools.train.run.run_folder import RunFolder

MOST_HELD = 2.0**60  # bytes of a process
STEPS = 60  # How often the range of efficiencies is halved.
SPREAD_STEPS = 5  # Fewer do not tell by how much steps differ.
SKIPPED = 3  # Steps of a run in which libraries are still being loaded.
ABOVE_MEASURED = 4.0  # A peak that was measured once, on cores that others used as well, may be exceeded so far.


@dataclass(frozen=True)
class RecordedRun:
    """What a run's folder says of it."""

    folder: Path
    config: TrainConfig
    seconds: float  # The median step.
    spread: float | None  # Half of the middle 80 % of steps, as a share of the median; None: too few to tell.
    memory: list[dict[str, Any]]
    timeline: Timeline | None
    counts: list[int] | None = None  # Modules of each stage, where the run has measured how to cut.
    mfu: float | None = None  # MFU of the median step.

    def candidate(self, profile: Profile, cluster: Cluster) -> PlanCandidate:
        """Return what was run, as a candidate with a price."""
        layers = sum(profile.counts_of(()))
        if self.counts is not None and profile.by_position and sum(self.counts) != layers:
            why = f"its stages have {sum(self.counts)} layers, and the model has {layers}"
            raise RunFolder(self.folder).wrong_cut(why)
        schedule = None if self.timeline is None else self.timeline.schedule
        return candidate_of(self.config, profile, cluster, self.counts, schedule)

    def predicted_seconds(self, candidate: PlanCandidate) -> float:
        """Price the step of the run, in which gradients may be accumulated over several passes."""
        return candidate.seconds + (self.config.training.accumulate - 1) * candidate.priced[0]


def read_run(path: str | Path, *, trust: bool = False) -> RecordedRun:
    """Read the folder of a run that `penstock train` has made."""
    root = Path(path)
    folder = RunFolder(root)
    try:
        config = read_config(read_json(root / "config.json"), str(root / "config.json"), trust=trust)
        check_model(config, str(root / "config.json"))
        lines = [_line(folder.metrics, line) for line in read_text(folder.metrics, MOST_METRICS).splitlines()]
        memory = _memory_rows(folder.memory) if folder.memory.is_file() else []
        cut = folder.cut()
        timeline = Timeline.load(folder.timeline) if folder.timeline.is_file() else None
    except ScheduleError as error:
        raise _damaged(folder.timeline, error.faults[0].message if error.faults else error) from None
    except FileNotFoundError as error:
        raise UsageError(
            f"{root} is not the folder of a run that has trained: there is no {Path(str(error.filename)).name}"
        ) from None
    except NotADirectoryError:
        raise UsageError(f"{root} is a file; name the folder of a run that penstock train has made") from None
    times = sorted(line["seconds"] for line in lines[SKIPPED:] if line.get("seconds"))
    if not times:
        raise UsageError(f"{root} has {len(lines)} steps; {SKIPPED + 1} or more tell what a step takes")
    middle = statistics.median(times)
    tenth = len(times) // 10
    spread = (times[-1 - tenth] - times[tenth]) / 2 / middle if len(times) >= SPREAD_STEPS else None
    counts = None if cut is None or cut["stages"] != stages_of(config) else cut["counts"]
    used = [line["mfu"] * line["seconds"] for line in lines[SKIPPED:] if line.get("seconds") and line.get("mfu")]
    mfu = statistics.median(used) / middle if used else None
    return RecordedRun(root, config, middle, spread, memory, timeline, counts, mfu)


def _damaged(path: Path, why: object) -> UsageError:
    return UsageError(f"{path} is damaged: {why}; it has to be as penstock train wrote it")


def _line(path: Path, text: str) -> dict[str, Any]:
    """Read the figures of one step."""
    line: dict[str, Any] = parse_json(text, path, dict)
    for name in ("seconds", "mfu"):
        if line.get(name) is not None and not (is_float(line[name]) and 0 < line[name] < inf):
            raise _damaged(path, f"a step has {line[name]!r} for its {name}")
    return line


def _memory_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_json(path, list)
    if not all(isinstance(row, dict) and {*KINDS, "process"} <= set(row) for row in rows):
        raise _damaged(path, f"it does not list {', '.join(KINDS)} and process for each process")
    held = [value for row in rows for value in row.values() if value is not None]
    odd = [value for value in held if not (is_float(value) and 0 <= value < MOST_HELD)]
    odd += [None for row in rows if row["process"] is None]
    if odd:
        raise _damaged(path, f"a process holds {str(odd[0])[:40]} bytes")
    return rows


def candidate_of(
    config: TrainConfig,
    profile: Profile,
    cluster: Cluster,
    counts: list[int] | None = None,
    schedule: Schedule | None = None,
) -> PlanCandidate:
    """Return what a configuration runs, as a candidate with a price.

    `counts` are the modules of each stage and `schedule` the one that ran, where a run has chosen these itself.
    """
    pipeline, layout, stages = config.pipeline, MeshLayout.of(config), stages_of(config)
    rows = max(1, config.data.batch // config.training.accumulate // layout.dp // pipeline.microbatches)
    pricing = Pricing(profile, cluster, layout, rows)
    cuts = _cuts_of(config, profile, counts) or pricing.cut(stages)
    if cuts is None or len(cuts) != stages - 1:
        raise UsageError(
            f"the model's {sum(profile.counts_of(()))} layers cannot be cut into {stages} stages as the run has them "
            f"(pipeline.stages, balance, split_at); is this the configuration that was run?"
        )
    if is_schedule_file(pipeline.schedule) or is_auto(pipeline.schedule):
        if schedule is None and is_auto(pipeline.schedule):
            raise UsageError("the run has searched for its schedule and recorded no step that would show it")
        schedule, name = schedule or Schedule.load(Path(pipeline.schedule)), "searched"
    else:
        schedule, name = None, family(pipeline.schedule).name
    return PlanCandidate(
        pricing,
        name,
        stages // layout.pp,
        pipeline.microbatches,
        pipeline.recompute != "never",
        tuple(cuts),
        optimizer_states(config),
        schedule,
        config.training.accumulate > 1,
    )


def _cuts_of(config: TrainConfig, profile: Profile, counts: list[int] | None) -> tuple[int, ...] | None:
    """Return the units that stages 1, 2, ... begin with, if a configuration or a run states them."""
    pipeline = config.pipeline
    counts = counts or (pipeline.balance if isinstance(pipeline.balance, list) else None)
    names = [unit.name for unit in profile.one]
    if pipeline.split_at:
        return tuple(names.index(name) for name in pipeline.split_at if name in names)
    if counts is not None and sum(counts) <= sum(map(bool, names)):
        return profile.cuts_of(counts)
    return None


def calibrate(cluster: Cluster, profile: Profile, run: RecordedRun, most: float = 1.0) -> Cluster:
    """Find the efficiency, up to `most`, at which a step of the run is predicted to take what it took."""

    def predicted(efficiency: float) -> float:
        return run.predicted_seconds(run.candidate(profile, cluster.at(efficiency)))

    low, high = 1e-4, most
    if predicted(high) > run.seconds:
        raise UsageError(
            f"a step took {run.seconds:.4g} s, but would take {predicted(high):.4g} s if every product ran at the "
            f"device's peak of {cluster.device.peak:.3g} FLOP/s (device.peak); state a higher peak, or faster memory "
            f"and links"
        )
    if predicted(low) < run.seconds:
        raise UsageError(
            f"a step took {run.seconds:.4g} s, but would take only {predicted(low):.4g} s if products ran at {low:g} "
            f"of the device's peak of {cluster.device.peak:.3g} FLOP/s (device.peak): that run was on another cluster"
        )
    for _ in range(STEPS):
        middle = (low + high) / 2
        if predicted(middle) > run.seconds:
            low = middle
        else:
            high = middle
        if high - low < 1e-4 * high:
            break
    return cluster.at(high)


def from_run(run: RecordedRun, profile: Profile, cluster: Cluster | None = None) -> Cluster:
    """Calibrate a cluster by a run, or where the run was if none is stated.

    Its error bar is the spread of the run's steps, 5 % at least; of a few steps, the cluster's own.
    """
    here = cluster_of(run, profile, free_memory()) if cluster is None else cluster
    found = calibrate(here, profile, run, ABOVE_MEASURED if cluster is None else 1.0)
    return found if run.spread is None else replace(found, error=min(1.0, max(0.05, run.spread)))


def cluster_of(run: RecordedRun, profile: Profile, memory: float) -> Cluster:
    """Describe this machine as a run has had it: its share of the memory per process, and the peak of its MFU."""
    processes = processes_of(run.config)
    if run.mfu:
        peak = run.config.data.batch * profile.model_flops / (run.seconds * run.mfu * processes)
    else:
        peak = (peak_flops(run.config) or (1e12, ""))[0]
    alone = [each["process"] - (each.get("tensors") or sum(each[kind] or 0.0 for kind in KINDS)) for each in run.memory]
    device = Device(memory=memory / processes, peak=peak, reserved=max(alone, default=5e8), holds_checkpoints=True)
    return Cluster(name=f"as {run.folder}", hosts=1, devices=processes, device=device)
