"""Puts a pipeline among its replicas: what was asked for, checked, and built in the one order that works.

    tensors are spread (tp)  ->  all copies take the first one's values  ->  stages are sharded (fsdp)

Parameters that several stages hold are found before anything is spread, by identity; afterwards they are found by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from penstock.errors import PeerFailure, UsageError
from penstock.group.facts import compared
from penstock.model.original.replaced import mark_replaced
from penstock.parallel.axis_link import AxisLink
from penstock.parallel.composition import Composition
from penstock.parallel.reduce import Reducer, make_equal
from penstock.parallel.replicas import Replicas
from penstock.parallel.sharded import Sharder, check_shardable
from penstock.parallel.spread_norms import Norms
from penstock.parallel.stage_hooks import ParallelHooks
from penstock.parallel.tensor import SPREAD, SpreadValues, spread
from penstock.runtime.transport.gloo.transport import DistributedTransport

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["compose"]


def compose(pipe: Pipeline, wanted: Composition, places: Sequence[Sequence[tuple[int, str]]]) -> Replicas:
    """Spread, hand out and shard this rank's stages; what then runs beside its steps."""
    axes = wanted.axes
    (executor,) = pipe.deployment.ranks.executors.values()
    transport = pipe.deployment.world.transport
    assert isinstance(transport, DistributedTransport)
    modules = {index: stage.module for index, stage in executor.stages.items()}
    with_loss = {index: stage.holds for index, stage in executor.stages.items()}
    links = {
        axis: AxisLink(axes.group(axis), pipe.deployment.world.timeout, transport, word, unseen=axis == "tp")
        for axis, word in (("dp", "replica"), ("tp", "shard"))
        if axes.size(axis) > 1
    }
    link = links.get("dp")
    transport.name_place(**{each.word: each.index for each in links.values()})
    host = _store_host(axes.mesh)
    if host is not None:
        for one in (transport, *(each._transport for each in links.values())):
            one.name_far_host(host)
    for each in links.values():
        each.report_by(executor.progress, executor.where)
        _agree(pipe, each, wanted)
    for index, module in modules.items():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise UsageError(
                f"the parameters of stage {index} are spread or sharded already, by fully_shard(), DTensor or an "
                f"earlier Pipeline; pass the model as it was built, and leave that to parallel_options="
            )
    for each in links.values():
        for module in with_loss.values():
            make_equal([*module.parameters(), *module.buffers()], each)
    before = [
        (stage.part.names[name], index, parameter)
        for index, stage in executor.stages.items()
        for name, parameter in stage.module.named_parameters()
    ]
    values = None
    if wanted.plan is not None and "tp" in links:
        local = {index: stage.part for index, stage in executor.stages.items()}
        spread(pipe.deployment.split.parts, local, wanted.plan, axes.along("tp"))
        values = SpreadValues(axes.along("tp"))
        for stage in executor.stages.values():
            stage.carries(*SPREAD)
    sharder = None
    if wanted.shards:
        for stage in executor.stages.values():
            stage.part.before_sharding()
        whole = _whole(modules, places)
        check_shardable(
            {index: stage.part for index, stage in executor.stages.items()}, wanted.precision is not None, whole
        )
        sharder = Sharder(executor, axes.along("dp"), wanted.window, wanted.precision, whole)
    now = {id(parameter) for module in with_loss.values() for parameter in module.parameters()}
    replaced = [(name, index, parameter) for name, index, parameter in before if id(parameter) not in now]
    mark_replaced(parameter for _, _, parameter in replaced)
    pipe.deployment.clock.first = axes.index("dp") * pipe.microbatches
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    reducer = Reducer(with_loss, names, link, () if sharder is None else sharder.managed)
    last = pipe.deployment.ranks.last() is not None
    replicas = Replicas(
        executor,
        link,
        reducer,
        sharder,
        Norms(links),
        weighing=lambda: pipe.batches.weighing.when if last else "never",
        shards=links.get("tp"),
        loss_parallel=last and wanted.plan is not None and wanted.plan.loss_parallel,
    )
    replicas.replaced = replaced
    executor.replication = replicas
    if sharder is not None or values is not None:
        executor.computations.hooks = ParallelHooks(sharder, values)
    return replicas


def _store_host(mesh: Any) -> PeerFailure | None:
    """What to say where process 0, which has the store, is gone: other ranks then leave because of it."""
    places = (mesh.mesh == 0).nonzero().tolist()
    if not places:
        return None
    at = dict(zip(mesh.mesh_dim_names, places[0], strict=True))
    cause = "died or left (the store that it hosts is gone)"
    return PeerFailure(at.get("pp", 0), cause, replica=at.get("dp", 0), shard=at.get("tp"))


def _whole(modules: Mapping[int, nn.Module], places: Sequence[Sequence[tuple[int, str]]]) -> set[nn.Parameter]:
    """What is not sharded: parameters that several stages hold, scalars, and what has no numbers."""
    tied = {
        modules[stage].get_parameter(name)
        for group in places
        if len({stage for stage, _ in group}) > 1
        for stage, name in group
        if stage in modules
    }
    every = (each for module in modules.values() for each in module.parameters())
    return tied | {each for each in every if not each.dim() or not each.numel()}


def _agree(pipe: Pipeline, link: AxisLink, wanted: Composition) -> None:
    """The copies of a stage must have been given the same pipeline, and get the same random numbers."""
    facts = pipe.facts()
    facts["tensor_plan"] = (str(wanted.plan), "")
    facts["replicate"] = (str(wanted.replicate), "")
    facts["window"] = (str(wanted.window), "")
    facts["shard_precision"] = (str(wanted.precision), "")
    answers = link.exchange((facts, pipe.deployment.clock.seed))
    faults = compared([theirs for theirs, _ in answers], link.word)
    if faults:
        raise UsageError(f"the {link.word}s were given different pipelines; pass the same on every rank\n  {faults}")
    pipe.deployment.clock.seed = answers[0][1]
