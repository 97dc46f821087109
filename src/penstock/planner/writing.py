"""A plan as files: a configuration that `penstock train` runs, and the schedule."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import writing
from penstock.errors import UsageError
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import IN_MEMORY
from penstock.planner.layout import MeshLayout
from penstock.planner.plans import Plan
from penstock.tools.train.config.read import to_document
from penstock.tools.train.config.settings import TrainConfig


def config_of(plan: Plan, schedule: str | None = None) -> TrainConfig:
    """Return the configuration of a plan; `schedule` is the file of one that no family has."""
    if plan.layout.cp > 1:
        raise UsageError(
            f"{plan.layout} has an axis cp, which Penstock does not run; plan with cp=1 to get a configuration"
        )
    if plan.config.model.source == IN_MEMORY:
        raise UsageError(
            "a plan of a module in memory has no configuration; pass it to Pipeline(plan=...), or plan the function "
            'that builds the module by its name, "module:function"'
        )
    return run_config(
        plan.config,
        plan.layout,
        plan.counts,
        None if plan.by_position else plan.cuts,
        schedule=schedule or plan.family,
        microbatches=plan.microbatches,
        recompute=plan.recompute,
    )


def run_config(
    config: TrainConfig,
    layout: MeshLayout,
    counts: Sequence[int],
    names: Sequence[str] | None,
    *,
    schedule: str,
    microbatches: int,
    recompute: bool = False,
) -> TrainConfig:
    """Return a configuration with another layout, schedule and cut.

    `counts` has the modules of each stage. A model that is not cut by counts is cut before the modules `names`.
    """
    stages = len(counts)
    by_counts = stages > 1 and names is None
    pipeline = replace(
        config.pipeline,
        ranks=layout.pp,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        recompute="always" if recompute else "never",
        balance=list(counts) if by_counts else "parameters",
        split_at=list(names or ()) if stages > 1 else [],
    )
    mesh = replace(
        config.mesh,
        replicas=layout.dp,
        tp=layout.tp,
        replicate="fsdp" if layout.sharded else "ddp",
        window=max(1, stages // layout.pp),
        inner="pp" if layout.inner == "pp" else "dp",
    )
    return replace(config, pipeline=pipeline, mesh=mesh, training=replace(config.training, accumulate=1))


def write_plan(plan: Plan, path: Path) -> Path:
    """Write the configuration to `path`, TOML, and the schedule beside it; returns the path of the schedule."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file to write, such as {path / 'plan.toml'}")
    schedule = path.with_suffix(".schedule.json")
    config = config_of(plan, str(schedule) if plan.family == "searched" else None)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    plan.schedule.save(schedule)
    config = replace(config, prediction={"of": priced_settings(config), **plan.figures})
    title = f"# {plan.layout}, {plan.family}: {plan.seconds:.4g} s per step predicted, within {plan.error:.0%}\n"
    writing.save(path, title + "\n" + to_toml(config))
    return schedule


def priced_settings(config: TrainConfig) -> str:
    """Compute a mark of all settings that a price depends on: a prediction holds while it stays the same."""
    document = to_document(config)
    chosen = {name: document[name] for name in ("lora", "pipeline", "mesh")}
    keys = {"model": ("source", "options", "dtype"), "data": ("batch", "sequence"), "optimizer": ("name", "momentum")}
    for name, some in {**keys, "training": ("accumulate",)}.items():
        chosen[name] = {key: document[name][key] for key in some}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def to_toml(settings: TrainConfig | Cluster) -> str:
    """Return the keys of a configuration, or of a cluster, that differ from the defaults, as TOML."""
    own, default = (dataclasses.asdict(each) for each in (settings, type(settings)()))
    return "\n".join(_tables(own, default, "")).strip() + "\n"


def _tables(document: Mapping[str, Any], default: Mapping[str, Any], path: str) -> Iterator[str]:
    own = {name: value for name, value in document.items() if value != default.get(name) and value is not None}
    plain = {name: value for name, value in own.items() if not isinstance(value, Mapping)}
    if plain and path:
        yield f"[{path}]"
    yield from (f"{_key(name)} = {_value(value)}" for name, value in plain.items())
    if plain:
        yield ""
    for name, value in own.items():
        if isinstance(value, Mapping):
            inner = default.get(name)
            yield from _tables(value, inner if isinstance(inner, Mapping) else {}, f"{path}.{_key(name)}".lstrip("."))


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_value(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)
