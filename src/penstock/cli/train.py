"""`penstock train`: a configuration trained as a pipeline, on local processes or under torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import guarded, terminal_width, working, write
from penstock.cli.source import option
from penstock.errors import UsageError
from penstock.tools.train.config.consistent import check_consistent, check_model
from penstock.tools.train.config.elastic import describe_layouts
from penstock.tools.train.config.paths import check_paths
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import check_sending, functions_in, is_trusted, require_trust
from penstock.tools.train.launch.environment import Job, prepare_environment, start_fork_server
from penstock.tools.train.launch.stopping import Stop, asking, die_with_parent
from penstock.tools.train.run.run_folder import RunFolder

Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY.SUB=VALUE]...",
        help="A configuration (TOML), and settings that change it. Without one: the defaults.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, option("Show the stages, the schedule and predictions, and stop.", "--dry-run")]
Trust = Annotated[
    bool, option("Import the functions that a configuration names which you may not have written.", "--trust")
]
Resume = Annotated[bool, option("Resume from the newest checkpoint of the run in `output`.", "--resume")]
Fresh = Annotated[bool, option("Remove the run that is in `output`, and start over.", "--fresh")]

Verbose = Annotated[bool, option("Also show how the same run starts on several hosts.", "--verbose")]


def load_items(
    items: list[str] | None, *, consistent: bool = True, trust: bool | None = None
) -> tuple[TrainConfig, Path | None]:
    """Return the configuration that the arguments mean, checked; and its file.

    Where `trust` is None, a TOML file and the command line are the user's own; JSON is what runs write, and may be of
    anybody's run.
    """
    files = [item for item in items or () if "=" not in item]
    if len(files) > 1:
        raise UsageError(f"{files[0]} and {files[1]} are two configurations; give one, and settings as key.sub=value")
    path = Path(files[0]) if files else None
    trust = path is None or path.suffix != ".json" if trust is None else trust
    config = load_config(path, [item for item in items or () if "=" in item], trust=trust)
    check = check_consistent if consistent else check_model
    check(config, "the configuration" if path is None else str(path))
    return config, path


@guarded
def train(
    items: Items = None,
    dry_run: DryRun = False,
    trust: Trust = False,
    resume: Resume = False,
    fresh: Fresh = False,
    verbose: Verbose = False,
) -> None:
    """Train a model as a pipeline: a byte-level GPT on Python's own library, or what a configuration says.

    Ranks are local processes, started again from the newest checkpoint when one fails. Under torchrun each process is a
    rank, on any number of hosts. Ctrl-C finishes the step, saves and leaves; twice leaves at once.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun's agent, which may go while torch is being loaded
    prepare_environment()
    config, path = load_items(items, trust=trust if trust or dry_run else None)
    if resume and fresh:
        raise UsageError("--resume continues the run, --fresh removes it; give one of them")
    if not dry_run:
        require_trust(config, "training")
        check_sending(config)
        check_paths(config, "the configuration" if path is None else str(path))
    raise typer.Exit(_dry_run(config) if dry_run else _train(config, items or [], resume, fresh, verbose))


def _dry_run(config: TrainConfig) -> int:
    if not is_trusted(config):  # a look at somebody else's configuration must not run their code
        lines = [
            f"  {key} = {text!r}, of the working folder or installed" for key, text in functions_in(config).items()
        ]
        write(
            "\n".join(["the configuration names Python functions, which training it would import and call:", *lines])
            + "\nread them, then --dry-run --trust builds and measures the model"
        )
        return 0
    with working("building and measuring"):
        from penstock.tools.train.dry_run import make_plan  # loads torch

        plan = make_plan(config)
    write(plan.text(terminal_width()))
    if config.launch.elastic:
        write(f"\nelastic: numbers of processes that the run can go on with: {describe_layouts(config)}")
    return 0


def _train(config: TrainConfig, items: list[str], resume: bool, fresh: bool, verbose: bool) -> int:
    folder = RunFolder(Path(config.output))
    resume_command = shlex.join(["penstock", "train", *items, "--resume"])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _as_rank(config, resume_command, folder)
    lock = folder.prepare(config, resume=resume, fresh=fresh)
    try:
        if config.pipeline.workers == "threads":
            return _train_here(config, resume_command, Stop(*asking()), resume)
        start_fork_server(config)
        from penstock.tools.train.launch.launch import launch, torchrun_command  # loads torch

        if verbose:
            write(f"{torchrun_command(config, items)}\n")
        return launch(Job(config, resume_command, resume), _notify)
    finally:
        lock.free()


def _train_here(config: TrainConfig, resume_command: str, stop: Stop, resume: bool = False) -> int:
    from penstock.tools.train.worker import log_as, train_here  # loads torch

    log_as(config, int(os.environ.get("RANK", "0")))
    with stop:
        return train_here(Job(config, resume_command, resume), stop)


def _notify(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed; the ranks still finish their step and save
        write(f"penstock: {text}", sys.stderr)


def _as_rank(config: TrainConfig, resume_command: str, folder: RunFolder) -> int:
    """Run one rank of torchrun, which starts ranks again by itself: so the run always goes on where it was."""
    lock = None
    if os.environ["RANK"] == "0":
        started_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        # The rank 0 of the attempt before may be on a host that is cut off, and finds that out after its own timeout.
        patience = config.pipeline.timeout if started_again else 0.0
        lock = folder.prepare(config, resume=folder.checkpoints.is_dir(), fresh=False, patience=patience)
    try:
        return _train_here(config, resume_command, Stop())
    finally:
        if lock is not None:
            lock.free()
