"""What one process of a run does, from its first line to its last.

The same for a rank that `penstock train` launched, a rank of torchrun, and the one process whose ranks are threads:
build, load the newest whole checkpoint, train, report where things are. A process that fails leaves a note about it
before it goes, because the launcher sees only exit codes, and names the culprit from those notes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.generators import seed_generators
from penstock.devices import backends
from penstock.errors import ModelError, PenstockError, UsageError
from penstock.parallel.group.joining import joining
from penstock.tools.train.build import build_run
from penstock.tools.train.config.consistent import processes_of
from penstock.tools.train.config.device import device_of
from penstock.tools.train.config.elastic import describe_layout, layout_for
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batches import check_validation, open_data
from penstock.tools.train.data.checks import position_warning
from penstock.tools.train.launch.attempts import let_go, new_prefix, reach_store, stand_by
from penstock.tools.train.launch.environment import Job
from penstock.tools.train.launch.rank_notes import leave_note, note_path, ready_path
from penstock.tools.train.launch.stopping import INTERRUPTED, Stop, asking, die_with
from penstock.tools.train.loop import Trainer
from penstock.tools.train.models.huggingface import left_out
from penstock.tools.train.resume import Resumed, resume
from penstock.tools.train.run.closing import closing_words
from penstock.tools.train.run.flops import utilisation
from penstock.tools.train.run.metrics import Metrics
from penstock.tools.train.run.outlets import open_outlets
from penstock.tools.train.run.progress import Progress, Reporter
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.steps import RunState
from penstock.tools.train.updates.nonfinite import NonFinite
from penstock.view.figures import visible
from penstock.writing import create

# Ranks that are all there connect within this time; it is longer where pipeline.timeout is.
CONNECT_SECONDS = 30.0
FINAL = 3  # exit code: starting again would end in the same way
log = logging.getLogger("penstock.train")


def train_launched(job: Job) -> int:
    """Train as a launched rank. Returns 0 or 130; anything else ends the process with its own exit code."""
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
            leave_note(note_path(folder, attempt, rank), rank, error, final)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(FINAL if final else 1)  # not through interpreter exit, which may wait for a stuck thread


def _leave_fork_server() -> None:
    """Close the end of the fork server's pipe that ranks inherit to fork from it: it ends when nobody holds one."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


# -- training


def train_here(job: Job, stop: Stop) -> int:
    """Train in this process, as one rank or as all of them; the exit code."""
    began = monotonic()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    elastic = job.config.launch.elastic and "WORLD_SIZE" in os.environ
    config = layout_for(job.config, count) if elastic else job.config
    if config.pipeline.workers != "processes" or count == 1 or dist.is_initialized():
        processes = config.pipeline.workers == "processes" and count > 1
        first = not processes or int(os.environ.get("RANK", "0")) == 0
        return train_as(job, config, stop, began, processes=processes, first=first)
    limit = timedelta(seconds=max(120.0, 2 * config.pipeline.timeout))
    store, rank = reach_store(limit)
    attempt = PrefixStore(new_prefix(store, rank, count, limit), store)
    needed = processes_of(config) if elastic else count
    if rank >= needed:
        return stand_by(attempt, rank)
    with _group(config, attempt, rank, needed):
        code = train_as(job, config, stop, began, processes=needed > 1, first=rank == 0)
    if rank == 0 and needed < count:
        let_go(attempt, range(needed, count))
    return code


def train_as(job: Job, config: TrainConfig, stop: Stop, began: float, *, processes: bool, first: bool) -> int:
    """Train as one rank of a group that is there, or as all ranks; `first` is the process that writes for all."""
    folder = RunFolder(Path(job.config.output))
    seed_generators(config.seed)  # a shuffle by Python's own `random` is the same on all ranks, too
    data = open_data(config)
    check_validation(config, data)
    state = RunState.of(config, build_run(config, folder, data, processes), data)
    share, peak = utilisation(config, state.pipe, data.first())
    kept = {name: getattr(config.checkpoint, name) for name in ("keep_last", "keep_every", "keep_best", "async_save")}
    checkpointer = Checkpointer(folder.checkpoints, leave_out=left_out(config), **kept)
    resumed = resume(job.config, state, checkpointer)
    if first:  # a configuration that the checkpoint does not fit has been refused by now
        folder.keep_config(job.config)
    start = resumed.step
    metrics = Metrics(folder.metrics, start, open_outlets(config, folder.root, start)) if first else None
    progress = Progress(sys.stdout if first else None, config.logging.every)
    for line in _first_lines(job, state, peak if share is not None else "", resumed):
        progress.write(line)
    reporter = Reporter(config.training.steps, metrics, progress, share)
    trainer = Trainer(state, checkpointer, folder, reporter)
    trainer.go_on(resumed.extra)
    try:
        ending = trainer.run(start, stop)
        if metrics is not None:
            metrics.check()
    except Exception:
        with suppress(PenstockError):  # a save that is under way is seen through, unless a peer is lost
            checkpointer.close()
        raise
    finally:
        reporter.close()
    checkpointer.close()
    if first:
        seconds = monotonic() - began
        progress.write(closing_words(config, folder, ending, checkpointer.latest(), seconds, job.resume_command))
    state.pipe.close()
    return INTERRUPTED if ending.stopped else 0


def _first_lines(job: Job, state: RunState, peak: str, resumed: Resumed) -> Iterator[str]:
    """Yield what a run reports before its first step: how it is laid out, or where it goes on."""
    if state.config != job.config:
        spare = int(os.environ["WORLD_SIZE"]) - processes_of(state.config)
        others = f"; processes that stand by: {spare}" if spare else ""
        yield f"elastic: {describe_layout(state.config)}, of {describe_layout(job.config)}{others}"
    if resumed.step:
        yield f"resuming from step {resumed.step}: {resumed.path}"
        if resumed.notes:
            yield f"note: changed since that checkpoint: {', '.join(resumed.notes)}"
    elif job.resumed or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        yield "from the beginning: there is no complete checkpoint"
    else:
        yield state.pipe.describe()
        yield f"data      {state.data.words}"
        if peak:
            yield f"peak      {peak}"
    if warning := position_warning(state.pipe.deployment.staged.model, state.data):
        yield warning
    if changed := getattr(state.data, "changed", ""):
        yield f"note: {changed}; losses will not be those of a run that was never stopped"


@contextmanager
def _group(config: TrainConfig, store: Any, rank: int, count: int) -> Iterator[None]:
    if count == 1:
        yield
        return
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores))
    limit = timedelta(seconds=max(CONNECT_SECONDS, config.pipeline.timeout))  # all are there: they have one prefix
    backend = backends() if device_of(config) else "gloo"
    with joining(store, rank, count, "all"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    yield
    # This comes only after a run that ended well: else a peer may be stuck in a collective.
    dist.destroy_process_group()


class _Visible(logging.Formatter):
    """Formats lines in which a terminal finds nothing to obey: they may hold names from files of others."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_as(config: TrainConfig, rank: int) -> None:
    """Begin the lines of `logging` with the rank."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible(f"[rank {rank}] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.logging.level.upper(), handlers=[handler], force=True)
