"""`penstock plan`: which layouts of a model fit on a cluster, which is fastest, and how a run compares with that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, count, option
from penstock.cli.train import Trust, load_items
from penstock.errors import UsageError
from penstock.tools.train.config.source import require_trust
from penstock.view.figures import counted

_OF_PIPELINE = ("ranks", "stages", "microbatches", "schedule", "recompute", "balance", "split_at")
CHOSEN = (  # settings that a plan chooses
    *(f"pipeline.{key}=" for key in _OF_PIPELINE),
    *(f"mesh.{key}=" for key in ("replicas", "replicate", "tp", "inner")),
)

Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL|CONFIG] [KEY.SUB=VALUE]...",
        help='"gpt", "huggingface:FOLDER", "huggingface:NAME" or "module:function", or a configuration (TOML); and '
        "settings that change it.",
        show_default=False,
    ),
]
ClusterFile = Annotated[
    Path | None, option("The cluster, TOML; examples/clusters/ has some.", "--cluster", "-c", metavar="FILE")
]
Here = Annotated[bool, option("Plan for this machine; costs are measured, on processes.", "--here")]
Devices = Annotated[int | None, count("With --here: processes (default: cores).", "--devices")]
From = Annotated[str | None, option("The folder of a run that calibrates the efficiency.", "--from", metavar="RUN")]
Check = Annotated[str | None, option("Compare a run with its prediction, and plan again.", "--check", metavar="RUN")]
Batch = Annotated[int | None, count("Rows of a step.", "--batch", metavar="ROWS")]
Sequence = Annotated[int | None, count("Tokens of a row.", "--sequence")]
Save = Annotated[
    Path | None, option("Write the best plan's configuration, and its schedule beside it.", "--save", metavar="FILE")
]
Number = Annotated[int, count("With --save: another plan than the best.", "--number")]


@guarded
def plan(
    items: Items = None,
    cluster: ClusterFile = None,
    here: Here = False,
    devices: Devices = None,
    source: From = None,
    check: Check = None,
    batch: Batch = None,
    sequence: Sequence = None,
    save: Save = None,
    number: Number = 1,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Plan how a model is laid out on a cluster: what fits, what is fastest, and what limits it.

    Nothing is trained, and the model is built without memory. The best plan is written as a configuration for
    penstock train with --save.
    """
    if check is not None:
        if items or here or number != 1 or any(each is not None for each in (source, save, batch, sequence, devices)):
            raise UsageError("--check compares a run with its own prediction; give it --cluster at most")
        _check(check, cluster, trust, as_json)
        return
    if not here and cluster is None and source is None:
        raise UsageError("say what to plan for: --cluster FILE, --here for this machine, or --from RUN")
    if here and (cluster is not None or source is not None):
        raise UsageError("--here measures this machine; leave out --cluster and --from")
    if devices is not None and not here:
        raise UsageError("--devices is for --here; a cluster's file says how many it has (hosts, devices)")
    if number != 1 and save is None:
        raise UsageError("--number chooses which plan is written; add --save FILE")
    if not items and source is not None:
        if not (Path(source) / "config.json").is_file():
            raise UsageError(f"{source} is not the folder of a run that has trained: there is no config.json")
        items = [str(Path(source) / "config.json")]  # the model of the run
    config = _config(items, trust)
    with working("planning"):
        from penstock.planner.plan import plan as make_plans  # loads torch
        from penstock.planner.plans import plans_document, plans_text

        plans = make_plans(config, cluster, batch=batch, sequence=sequence, run=source, devices=devices, trust=trust)
    document = plans_document(plans)
    if save is not None and plans.ranked:
        document["saved"] = _save(plans, save, number)
    if as_json:
        write_json(document)
    else:
        write(plans_text(plans))
        if "saved" in document:
            write(f"\nwrote {save} and {document['saved']}; penstock train {save} runs it")
    if not plans.ranked:
        raise typer.Exit(1)


def _config(items: list[str] | None, trust: bool) -> Any:
    """Read the configuration; a model's name stands for one that is otherwise the default."""
    given = [
        f"model.source={item}" if item == "gpt" or (":" in item and "=" not in item) else item for item in items or ()
    ]
    chosen = [item for item in given if item.startswith(CHOSEN)]
    if chosen:
        raise UsageError(
            f"{', '.join(chosen)}: that is what a plan chooses; leave it out, save a plan and change it there, or call "
            f"penstock.plan(layout=, schedules=, recompute=) from Python"
        )
    config, _ = load_items(given, consistent=False, trust=trust)
    require_trust(config, "planning")
    return config


def _save(plans: Any, path: Path, number: int) -> str:
    from penstock.planner.writing import write_plan  # loads torch

    if number > len(plans.ranked):
        raise UsageError(f"--number is {number}, and the ranking has {counted(len(plans.ranked), 'plan')}")
    return str(write_plan(plans.ranked[number - 1], path))


def _check(run: str, cluster: Path | None, trust: bool, as_json: bool) -> None:
    with working("planning"):
        from penstock.planner.comparison import compare_run, comparison_document, comparison_text  # loads torch

        found = compare_run(run, cluster, trust=trust)
    if as_json:
        write_json(comparison_document(found))
    else:
        write(comparison_text(found))
