"""What one process of a run does, from its first line to its last.

The same for a rank that `penstock train` launched, a rank of torchrun, and the one process whose ranks are threads:
build, load the newest whole checkpoint, train, say where things are. A process that fails leaves a note about it
before it goes, because the launcher sees only exit codes, and names the culprit from those notes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.plain_files import create, read_plain, write_whole
from penstock.checkpoint.generators import seed_generators
from penstock.checkpoint.load.loading import Loaded
from penstock.checkpoint.processes import Processes
from penstock.errors import CheckpointError, ModelError, PeerFailure, PenstockError, UsageError
from penstock.optim.scaler import GradScaler
from penstock.parallel.mesh import mesh as make_mesh
from penstock.pipeline import Pipeline
from penstock.train.build import build_model, build_pipeline
from penstock.train.config.consistent import stages_of
from penstock.train.config.elastic import describe_layout, layout_for
from penstock.train.config.read import changes, to_document
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batch import DataBatches
from penstock.train.data.batches import open_data
from penstock.train.data.packing_check import check_packing
from penstock.train.data.vocabulary import check_vocabulary, vocabulary_of
from penstock.train.launch.attempts import new_prefix
from penstock.train.launch.parent import die_with
from penstock.train.launch.stopping import INTERRUPTED, Stop, asking
from penstock.train.loop import Trainer
from penstock.train.models.huggingface import check_base, left_out
from penstock.train.run.closing import closing_words
from penstock.train.run.flops import utilisation
from penstock.train.run.metrics import Metrics
from penstock.train.run.outlets import open_outlets
from penstock.train.run.progress import Progress
from penstock.train.run.run_folder import RunFolder, write_json
from penstock.train.updates.ema import WeightAverage
from penstock.train.updates.nonfinite import NonFinite
from penstock.train.updates.optimizer import build_optimizer
from penstock.train.updates.rate import build_rate, follow_config, options_of

FINAL = 3  # exit code: starting again would end in the same way
log = logging.getLogger("penstock.train")


@dataclass(frozen=True)
class Job:
    """What a process is told; it travels to it pickled."""

    config: TrainConfig
    resume_command: str  # the command that goes on with this run
    resumed: bool = False  # there was such a run before
    launcher: int = 0  # the process that all ranks end with


def note_path(folder: RunFolder, attempt: int, rank: int) -> Path:
    """The file in which a rank that failed says why."""
    return folder.logs / f"failed-{attempt}-{rank}.json"


def ready_path(folder: RunFolder, attempt: int, rank: int) -> Path:
    """The file that is there while a rank can be asked to stop."""
    return folder.logs / f"ready-{attempt}-{rank}"


def enter(job: Job) -> int:
    """The entrance of a launched rank. Returns 0 or 130; anything else ends the process with its own exit code."""
    with Stop(*asking(), insists=False) as stop:  # first of all: an interrupt from here on is a request
        os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher, which passes it on, once
        _leave_fork_server()
        die_with(job.launcher)
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        folder = RunFolder(Path(job.config.output))
        create(ready_path(folder, attempt, rank)).close()
        log_as(job.config, rank)
        try:
            return train_here(job, stop)
        except BaseException as error:
            final = isinstance(error, (UsageError, ModelError, NonFinite))
            _leave_note(note_path(folder, attempt, rank), rank, error, final)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(FINAL if final else 1)  # not through interpreter exit, which may wait for a stuck thread


def _leave_fork_server() -> None:
    """The fork server ends when nobody holds the other end of its pipe; ranks are given that end too, to fork from it
    themselves, so they put it away."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _leave_note(path: Path, rank: int, error: BaseException, final: bool) -> None:
    cause, culprit = f"{type(error).__name__}: {error}", rank
    place: dict[str, Any] = {}
    if isinstance(error, PeerFailure):
        culprit, cause = error.rank, error.cause
        place = {"stage": error.stage, "action": error.action, "microbatch": error.microbatch}
    elif isinstance(error, PenstockError):
        cause = str(error)
        other = re.match(r"process (\d+): ", cause)  # of a save: what went wrong on another rank
        if isinstance(error, CheckpointError) and other:
            culprit, cause = int(other[1]), cause[other.end() :]
    usage = isinstance(error, UsageError)
    note = {"rank": rank, "culprit": culprit, "cause": cause, "final": final, "usage": usage, **place}
    with suppress(OSError):  # on a full disk the exit code must do
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, note)
        write_whole(path.with_suffix(".txt"), "".join(traceback.format_exception(error)))


# -- training


def train_here(job: Job, stop: Stop) -> int:
    """Train in this process, as one rank or as all of them; the exit code."""
    began = monotonic()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    config, folder = job.config, RunFolder(Path(job.config.output))
    if config.launch.elastic and "WORLD_SIZE" in os.environ:
        config = layout_for(config, count)
    processes = config.pipeline.workers == "processes" and count > 1
    rank = int(os.environ.get("RANK", "0")) if processes else 0
    with _group(config, processes):
        seed_generators(config.seed)  # a shuffle by Python's own `random` is the same on all ranks, too
        data = open_data(config)
        pipe = _pipeline(config, folder, data, processes)
        optimizer = build_optimizer(config, pipe)
        rate = build_rate(config, optimizer)
        average = None if config.training.ema is None else WeightAverage(pipe, config.training.ema)
        share, peak = utilisation(config, pipe, data.first())
        saving = config.checkpoint
        checkpointer = Checkpointer(
            folder.checkpoints,
            keep_last=saving.keep_last,
            keep_every=saving.keep_every,
            keep_best=saving.keep_best,
            async_save=saving.async_save,
            leave_out=left_out(config),
        )
        scaler = GradScaler(pipe) if config.pipeline.precision == "fp16" else None
        start, extra, notes = 0, {}, []
        if checkpointer.latest() is not None:
            options = options_of(optimizer)
            averages = None if average is None else average.tensors
            loaded = _load(
                job, checkpointer, pipe, optimizer, scheduler=rate, scaler=scaler, data=data, averages=averages
            )
            check_base(config, loaded.extra.get("base"))
            follow_config(config, optimizer, rate, options)
            if average is not None:
                average.begin(loaded.averages)
            start, extra, notes = loaded.step, loaded.extra, _changed(loaded.config, config)
        first = rank == 0
        if first:  # a configuration that the checkpoint does not fit has been refused by now
            folder.keep_config(job.config)
        metrics = Metrics(folder.metrics, start, open_outlets(config, folder.root, start)) if first else None
        progress = Progress(sys.stdout if first else None, config.logging.every)
        if config != job.config:
            progress.say(f"elastic: {describe_layout(config)}, of {describe_layout(job.config)}")
        for line in _first_lines(job, pipe, data, peak if share is not None else "", checkpointer, start, notes):
            progress.say(line)
        trainer = Trainer(config, pipe, optimizer, rate, data, checkpointer, scaler, folder, metrics, progress, average)
        trainer.utilisation = share
        trainer.go_on(extra)
        try:
            ending = trainer.run(start, stop)
        except Exception:
            with suppress(PenstockError):  # a save that is under way is seen through, unless a peer is lost
                checkpointer.close()
            raise
        finally:
            progress.close()
            if metrics is not None:
                metrics.close()
        checkpointer.close()
        if first:
            seconds = monotonic() - began
            progress.say(closing_words(config, folder, ending, checkpointer.latest(), seconds, job.resume_command))
        pipe.close()
    return INTERRUPTED if ending.stopped else 0


def _first_lines(
    job: Job, pipe: Pipeline, data: DataBatches, peak: str, checkpointer: Checkpointer, start: int, notes: list[str]
) -> Iterator[str]:
    """What a run says before its first step: how it is laid out, or where it goes on."""
    if not start and not job.resumed and not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        yield pipe.describe()
        yield f"data      {data.words}"
        if peak:
            yield f"peak      {peak}"
    elif not start:
        yield "from the beginning: there is no complete checkpoint"
    if start:
        yield f"resuming from step {start}: {checkpointer.latest()}"
        if notes:
            yield f"note: changed since that checkpoint: {', '.join(notes)}"
    if changed := getattr(data, "changed", ""):
        yield f"note: {changed}; losses will not be those of a run that was never stopped"


def _load(job: Job, checkpointer: Checkpointer, pipe: Pipeline, optimizer: Any, **parts: Any) -> Loaded:
    try:
        loaded = checkpointer.load(pipe, optimizer, **parts)
    except CheckpointError as error:  # of another model or optimizer; a damaged one would have been passed over
        changed = changed_since(RunFolder(Path(job.config.output)), job.config)
        keys = f"\nchanged since that checkpoint: {', '.join(changed)}" if changed else ""
        raise UsageError(
            f"{error}{keys}\nto resume, the configuration must have the same model, adapters, optimizer and precision; "
            f"--fresh starts over"
        ) from error
    if not isinstance(loaded.config, dict) or not isinstance(loaded.extra, dict) or "skips" not in loaded.extra:
        raise UsageError(
            f"{loaded.path} was not saved by penstock train: it has no configuration or no count of skipped steps; "
            f"choose another output, or start over with --fresh"
        )
    return loaded


def changed_since(folder: RunFolder, config: TrainConfig) -> list[str]:
    """The keys that decide what a checkpoint holds, and that are not as they were when the run was last started."""
    try:
        before = json.loads(read_plain(folder.root / "config.json"))
    except (OSError, json.JSONDecodeError):
        return []
    after = to_document(config)
    return [words for name in ("model", "lora", "optimizer") for words in changes(before.get(name), after[name], name)]


def _changed(before: Any, config: TrainConfig) -> list[str]:
    """What the numbers depend on, beside the layout, and is not as it was."""
    after = to_document(config)
    return [
        words
        for name in ("seed", "model", "lora", "data", "loss", "optimizer", "training")
        for words in changes(before.get(name), after[name], name)
    ]


@contextmanager
def _group(config: TrainConfig, processes: bool) -> Iterator[None]:
    if not processes or dist.is_initialized():
        yield
        return
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=max(120.0, 2 * config.pipeline.timeout))
    store, rank, count = next(rendezvous("env://", timeout=limit))
    attempt = PrefixStore(new_prefix(store, rank, count, limit), store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=count, timeout=limit)
    yield
    dist.destroy_process_group()  # only after a run that ended well: else a peer may be stuck in a collective


def _pipeline(config: TrainConfig, folder: RunFolder, data: DataBatches, processes: bool) -> Pipeline:
    """Cut as the run was when it began, where that was measured: other cuts sum in another order."""
    model, loss = build_model(config)
    check_vocabulary(config, model, data)
    stages, balance, replicas = stages_of(config), None, config.mesh.replicas
    before = folder.cut()
    if before is not None and before["stages"] == stages and config.pipeline.balance in ("time", "memory"):
        balance = before["counts"]
    pipe = build_pipeline(
        config,
        model,
        loss,
        data.first().share(0, replicas),
        ranks=config.pipeline.ranks,
        balance=balance,
        transport=None if processes else "threads",
        mesh=_mesh(config),
    )
    if balance is None and pipe.deployment.staged.cuts and Processes(pipe, "penstock train").first:
        folder.keep_cut(stages, list(pipe.deployment.staged.balance))
    if config.data.packing:
        check_packing(pipe, config, vocabulary_of(model) or 256)
    return pipe


def _mesh(config: TrainConfig) -> Any:
    """The axes of the processes; None where there is no other than the pipeline's."""
    replicas, tp = config.mesh.replicas, config.mesh.tp
    if replicas * tp == 1:
        return None
    return make_mesh(pp=config.pipeline.ranks, dp=replicas, tp=tp, inner=config.mesh.inner)


def log_as(config: TrainConfig, rank: int) -> None:
    """Begin the lines of `logging` with the rank."""
    logging.basicConfig(
        level=config.logging.level.upper(),
        format=f"[rank {rank}] %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def read_note(path: Path) -> dict[str, Any] | None:
    """A rank's note, if it could leave one."""
    try:
        found: dict[str, Any] = json.loads(read_plain(path))
    except (OSError, json.JSONDecodeError):
        return None
    return found
