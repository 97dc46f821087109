"""Puts a pipeline among its replicas: what was asked for, checked, and built in the one order that works.

    tensors are spread (tp)  ->  all copies take the first one's values  ->  stages are sharded (fsdp)

Parameters that several stages hold are found before anything is spread, by identity; afterwards they are found by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from penstock.errors import UsageError
from penstock.model.lazy import stands_for
from penstock.model.split import Split
from penstock.parallel.link import Link
from penstock.parallel.norms import Norms
from penstock.parallel.reduce import Reducer, make_equal
from penstock.parallel.replicas import Replicas
from penstock.parallel.sharded import Sharder, check_shardable
from penstock.parallel.wanted import Composition
from penstock.runtime.facts import compared, facts_of
from penstock.runtime.transport.distributed import DistributedTransport

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["compose"]


def compose(pipe: Pipeline, wanted: Composition) -> Replicas:
    """Spread, hand out and shard this rank's stages; what then runs beside its steps."""
    axes = wanted.axes
    (executor,) = pipe.crew.executors.values()
    transport = pipe.world.transport
    assert isinstance(transport, DistributedTransport)
    modules = {index: stage.module for index, stage in executor.stages.items()}
    links = {
        axis: Link(axes.group(axis), pipe.world.timeout, transport, word)
        for axis, word in (("dp", "replica"), ("tp", "shard"))
        if axes.size(axis) > 1
    }
    link = links.get("dp")
    for each in links.values():
        each.report_by(executor.progress)
        _agree(pipe, each, wanted)
    sharder = None
    if link is not None:
        for module in modules.values():
            make_equal([*module.parameters(), *module.buffers()], link)
        if wanted.replicate == "fsdp":
            whole = _of_several_stages(pipe.split) | {
                parameter for module in modules.values() for parameter in module.parameters() if not parameter.dim()
            }
            check_shardable(modules, wanted.precision is not None, whole)
            sharder = Sharder(executor, axes.along("dp"), wanted.window, wanted.precision, whole)
    pipe.clock.first = axes.index("dp") * pipe.microbatches
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    reducer = Reducer(modules, names, link, () if sharder is None else sharder.parameters)
    weighs = pipe.crew.last() is not None and pipe.loss_reduction == "mean"
    replicas = Replicas(executor, link, reducer, sharder, Norms(links), weighs)
    executor.replication = replicas
    return replicas


def _agree(pipe: Pipeline, link: Link, wanted: Composition) -> None:
    """The copies of a stage must have been given the same pipeline, and get the same random numbers."""
    facts = facts_of(pipe)
    facts["replicate"] = (str(wanted.replicate), "")
    facts["window"] = (str(wanted.window), "")
    facts["shard_precision"] = (str(wanted.precision), "")
    told = link.exchange((facts, pipe.clock.seed))
    faults = compared([theirs for theirs, _ in told], link._word)
    if faults:
        raise UsageError(f"the {link._word}s were given different pipelines; pass the same on every rank\n  {faults}")
    pipe.clock.seed = told[0][1]


def _of_several_stages(split: Split) -> set[nn.Parameter]:
    """The parameters that more than one stage holds."""
    stages: dict[int, set[int]] = {}
    found: dict[int, list[nn.Parameter]] = {}
    for index, part in enumerate(split.parts):
        for parameter in part.module.parameters():
            key = id(stands_for(parameter))
            stages.setdefault(key, set()).add(index)
            found.setdefault(key, []).append(parameter)
    return {parameter for key, owners in stages.items() if len(owners) > 1 for parameter in found[key]}
