"""`penstock.plan`: which layout fits, and which is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from penstock.planner.calibration import from_run, read_run
from penstock.planner.candidates import PlanCandidate, default_families
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import IN_MEMORY, profile_config, profile_module
from penstock.planner.here import MeasuredPricing, measure, settings_of, this_machine
from penstock.planner.layout import MeshLayout
from penstock.planner.plans import Plans
from penstock.planner.profile import PENSTOCK
from penstock.planner.ranking import SearchSpace, candidates, layouts_of, rank_plans
from penstock.rules import check_count
from penstock.schedule import family
from penstock.tools.train.config.read import load_config, read_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.memory import optimizer_states

FEW_ROWS = 3  # Sizes of microbatches that are measured here, per layout.
HERE_PER_RANK = (1, 2)


def plan(
    model: str | Path | TrainConfig | nn.Module | Callable[[], nn.Module],
    cluster: Cluster | str | Path | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    options: dict[str, Any] | None = None,
    example: tuple[Any, ...] | dict[str, Any] | None = None,
    layout: MeshLayout | None = None,
    schedules: Sequence[str] | None = None,
    recompute: bool | None = None,
    run: str | Path | None = None,
    devices: int | None = None,
    trust: bool = False,
) -> Plans:
    """Find out how a model is best laid out on a cluster: enumerate, leave out what does not fit, price the rest.

    The model is built without memory, so it may be larger than this machine. Without a `cluster` and a `run`, plans
    are for this machine, and their costs are measured here, on processes.

    Args:
        model: What is trained: `"gpt"`, `"huggingface:FOLDER"` or `"huggingface:NAME"`, `"module:function"`; the path
            of a configuration of `penstock train`; a `TrainConfig`; a module; or a function that builds one, which
            is called without memory.
        cluster: The cluster, or the path of its TOML file.
        batch: Rows of a step, over all replicas.
        sequence: Tokens of a row.
        precision: `"fp32"`, `"bf16"` or `"fp16"`.
        optimizer: `"adamw"`, `"adam"`, `"sgd"` or `"adamw8bit"`.
        options: Keyword arguments of the model.
        example: With a module or a function: its inputs, a tuple of positional or a dict of keyword ones. Their
            first dimension is rows.
        layout: The only layout to look at.
        schedules: The families to choose from. By default, all that no other one beats in both time and memory.
        recompute: Whether forwards run again in the backward. By default, where that is needed or faster.
        run: The folder of a recorded run that calibrates the cluster's efficiency.
        devices: Without a cluster: how many processes to plan for. By default, one per core.
        trust: Whether the functions that a configuration's file, or the `run`, names are imported and called.

    Returns:
        The plans, the fastest first; `plans.best` is one for `Pipeline(plan=...)`.
    """
    is_named = isinstance(model, (str, Path, TrainConfig)) or not callable(model)
    if is_named:
        config = config_for(model, batch, sequence, precision, optimizer, options, trust=trust)
        if example is not None:
            raise UsageError("example= shows the inputs of a module or a function; a configuration has its own data")
    else:
        config = _config_of_module(example, cluster, options, batch, precision, optimizer)
    if config.pipeline.workers == "threads":
        raise UsageError(
            'plans are for ranks that are processes, each with its own memory; leave out pipeline.workers = "threads"'
        )
    space = SearchSpace(
        config.data.batch,
        optimizer_states(config),
        default_families() if schedules is None else [family(name).name for name in schedules],
        (False, True) if recompute is None else (recompute,),
    )
    among = None if layout is None else [layout]
    if cluster is None and run is None:
        return _plan_here(config, space, among, devices)
    recorded = None if run is None else read_run(run, trust=trust)
    known = stated_cluster(cluster)
    software = PENSTOCK if known is None else known.software
    if recorded is not None:
        known = from_run(recorded, profile_config(recorded.config, software), known)
    assert known is not None
    profile = profile_config(config, software) if is_named else profile_module(model, example, config, software)  # type: ignore[arg-type]
    return rank_plans(config, profile, known, among=among, space=space)


def _config_of_module(
    example: Any, cluster: Any, options: Any, batch: int | None, precision: str | None, optimizer: str | None
) -> TrainConfig:
    """Make the configuration of a module that none names."""
    if not isinstance(example, (tuple, dict)) or not example:
        raise UsageError("plan() of a module or a function also needs example=, its inputs: a tuple or a dict of them")
    if cluster is None:
        raise UsageError(
            "plan() of a module or a function needs cluster=; to measure on this machine, other processes must be able "
            'to build the model: pass "module:function"'
        )
    if options is not None:
        raise UsageError("options= are for a model that is named; pass functools.partial(function, ...) instead")
    first = next((each for each in pytree.tree_leaves(example) if isinstance(each, torch.Tensor)), None)
    if first is None or not first.dim():
        raise UsageError("example= has no tensor with rows; its tensors' first dimension is rows")
    tokens = first.shape[1] if first.dim() > 1 and not first.is_floating_point() else 1
    named = replace(TrainConfig(), model=replace(TrainConfig().model, source=IN_MEMORY))
    return config_for(named, batch, tokens, precision, optimizer)


def config_for(
    model: Any,
    batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    options: dict[str, Any] | None = None,
    *,
    trust: bool = False,
) -> TrainConfig:
    """Return the configuration that a call means."""
    if isinstance(model, TrainConfig):
        config = model
    elif isinstance(model, Path) or str(model).endswith((".toml", ".json")):
        config = load_config(model, trust=trust)
    elif isinstance(model, str) and (model == "gpt" or ":" in model):
        config = replace(TrainConfig(), model=replace(TrainConfig().model, source=model))
    else:
        raise UsageError(
            f'plan() takes "gpt", "huggingface:FOLDER", "huggingface:NAME", "module:function", a configuration, a '
            f"module or a function that builds one; got {model!r}"
        )
    changes: dict[str, dict[str, Any]] = {
        "data": {"batch": batch, "sequence": sequence},
        "pipeline": {"precision": precision},
        "optimizer": {"name": optimizer},
        "model": {"options": None if options is None else {**config.model.options, **options}},
    }
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value is not None:
            check_count(name, value)
    document = {
        table: {key: value for key, value in keys.items() if value is not None} for table, keys in changes.items()
    }
    read_config({table: keys for table, keys in document.items() if keys}, "plan()")
    return replace(config, **{table: replace(getattr(config, table), **keys) for table, keys in document.items()})


def stated_cluster(cluster: Cluster | str | Path | None) -> Cluster | None:
    """Return the cluster itself, or the one of a file."""
    return cluster if cluster is None or isinstance(cluster, Cluster) else Cluster.load(cluster)


def _plan_here(
    config: TrainConfig, space: SearchSpace, among: Sequence[MeshLayout] | None, devices: int | None
) -> Plans:
    """Measure the settings that fit on this machine, and rank by what was measured."""
    profile = profile_config(config, PENSTOCK)
    cluster = this_machine(config, profile.code, devices)
    space = replace(space, per_rank=HERE_PER_RANK)
    every = among or layouts_of(profile, cluster, space.batch)
    guessed = [
        candidate
        for each in every
        for candidate in candidates(each, lambda layout, rows: MeasuredPricing(profile, cluster, layout, rows), space)
        if candidate.fullest.process <= cluster.room
    ]
    known, peak = measure(config, settings_of(_few_sizes(guessed)))
    spread = max((each.spread for each in known.values()), default=0.0)
    device = replace(cluster.device, peak=peak)
    cluster = replace(cluster, device=device, error=max(cluster.error, min(1.0, spread)))

    def priced(layout: MeshLayout, rows: int) -> MeasuredPricing:
        return MeasuredPricing(profile, cluster, layout, rows, known)

    return rank_plans(config, profile, cluster, among=every, pricing_of=priced, space=space)


def _few_sizes(found: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Choose a few sizes of microbatches per layout: the largest that leave a pipeline enough of them."""
    sizes: dict[MeshLayout, set[int]] = {}
    for each in found:
        if each.microbatches >= 2 * each.layout.pp or each.layout.pp == 1 or each.pricing.rows == 1:
            sizes.setdefault(each.layout, set()).add(each.pricing.rows)
    few = {layout: sorted(rows)[-FEW_ROWS:] for layout, rows in sizes.items()}
    return [each for each in found if each.pricing.rows in few.get(each.layout, ())]
