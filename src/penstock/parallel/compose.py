"""Puts a pipeline among its replicas: what was asked for, checked, and built in the one order that works.

    tensors are spread (tp)  ->  all copies take the first one's values  ->  stages are sharded (fsdp)

Parameters that several stages hold are found before anything is spread, by identity; afterwards they are found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types

from penstock.errors import PeerFailure, UsageError
from penstock.model.lazy import mark_replaced
from penstock.parallel.axis_link import AxisLink
from penstock.parallel.composition import Composition
from penstock.parallel.data_parallel.reduce import Reducer, make_equal
from penstock.parallel.data_parallel.replicas import Replicas
from penstock.parallel.data_parallel.sharded import Sharder, check_shardable
from penstock.parallel.data_parallel.wrapped_stages import UserParallel, WrappedStages
from penstock.parallel.group.facts import compared
from penstock.parallel.tensor_parallel.spread import SPREAD, KnownMeshes, SpreadValues, spread
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.stage import Stage
from penstock.runtime.optim.norms import local_of
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.failure.peer_failures import STORE_GONE

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


Places = Sequence[Sequence[tuple[int, str]]]  # of parameters that are one object: their stages and names


class ParallelHooks:
    """`StageHooks` of the engine: what a computation needs where parameters are sharded or tensors are spread."""

    def __init__(self, sharder: Sharder | WrappedStages | None, values: SpreadValues | None) -> None:
        self._sharder, self._values = sharder, values

    def before(self, stage: int) -> None:
        if self._sharder is not None:
            self._sharder.before(stage)

    def after(self, stage: int) -> None:
        if self._sharder is not None:
            self._sharder.after(stage)

    def pack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        spread = self._values
        return {stage: value if spread is None else spread.pack(value) for stage, value in values.items()}

    def unpack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        spread = self._values
        return {stage: value if spread is None else spread.unpack(value) for stage, value in values.items()}

    def full(self, value: Any) -> Any:
        return value if self._values is None else self._values.full(value)


def compose(pipe: Pipeline, composition: Composition, places: Places) -> Replicas:
    """Spread, hand out and shard this rank's stages; return what then runs beside its steps."""
    axes = composition.axes
    (executor,) = pipe.deployment.ranks.executors.values()
    stages, held = executor.stages, {index: stage.holds for index, stage in executor.stages.items()}
    links = _linked(pipe, executor, composition)
    spread_already = _check_spread(stages, composition)
    for axis, link in links.items():
        for module in held.values():
            tensors = [*module.parameters(), *module.buffers()]
            make_equal([local_of(each) for each in tensors if axis == "dp" or not isinstance(each, DTensor)], link)
    before = [
        (stage.part.names[name], index, parameter)
        for index, stage in stages.items()
        for name, parameter in stage.module.named_parameters()
    ]
    values = None
    if composition.plan is not None and "tp" in links:
        local = {index: stage.part for index, stage in stages.items()}
        spread(pipe.deployment.staged.parts, local, composition.plan, axes.mesh["tp"])
    if "tp" in links and (composition.plan is not None or spread_already):
        values = SpreadValues(lambda key: axes.mesh["tp"])
        for stage in stages.values():
            stage.carries(*SPREAD)
    sharder = _sharded(executor, composition, places) if composition.shards else None
    now = {id(parameter) for module in held.values() for parameter in module.parameters()}
    replaced = [(name, index, parameter) for name, index, parameter in before if id(parameter) not in now]
    mark_replaced(parameter for _, _, parameter in replaced)
    pipe.deployment.counter.first = axes.index("dp") * pipe.microbatches
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    last = pipe.deployment.ranks.last is not None
    replicas = Replicas(
        executor,
        links,
        Reducer(held, names, links.get("dp"), () if sharder is None else sharder.managed),
        sharder,
        weighing=lambda: pipe.batches.weighing.when if last else "never",
        loss_parallel=last and composition.plan is not None and composition.plan.loss_parallel,
    )
    replicas.replaced = replaced
    executor.replication = replicas
    if sharder is not None or values is not None:
        executor.computations.hooks = ParallelHooks(sharder, values)
    _keep_kinds_apart(parameter for module in held.values() for parameter in module.parameters())
    return replicas


def _keep_kinds_apart(parameters: Iterable[nn.Parameter]) -> None:
    """Have optimizers update parameters one by one by default, in this process, if only some of them are spread.

    On accelerators, torch takes operations of many tensors by default, and these refuse plain tensors beside DTensors.
    """
    meshes = {each.device_mesh if isinstance(each, DTensor) else None for each in parameters}
    if len(meshes) > 1 and DTensor in _foreach_supported_types:
        _foreach_supported_types.remove(DTensor)


def compose_wrapped(pipe: Pipeline) -> WrappedStages:
    """Let the program say when the wrappers of the user's own gather, free and reduce."""
    executors = list(pipe.deployment.ranks.executors.values())
    if len(executors) > 1:
        raise UsageError(
            f"stages are wrapped for data parallelism, and {len(executors)} ranks share this process: their "
            f"collectives would meet in any order; start a process per rank, with torchrun, or pass plain modules"
        )
    return drive(pipe, {index: stage.holds for index, stage in executors[0].stages.items()})


def drive(pipe: Pipeline, wrapped: Mapping[int, nn.Module]) -> WrappedStages:
    """Make the wrappers in these modules, by stage, follow the program of this process's rank."""
    (executor,) = pipe.deployment.ranks.executors.values()
    group = pipe.deployment.world.group
    stages = WrappedStages(wrapped, [] if group is None else dist.get_process_group_ranks(group))
    executor.replication = stages
    executor.computations.hooks = ParallelHooks(stages, None)
    return stages


def carry_spread(pipe: Pipeline, tensors: Iterable[Any], get_mesh: Callable[..., Any] | None) -> None:
    """Let DTensors cross between the stages of this process's rank and others, which the user has spread.

    `tensors` and `get_mesh` say over which meshes; they are of the user's own, and outputs stay as they are.
    """
    deployment = pipe.deployment
    for executor in deployment.ranks.executors.values():
        for stage in executor.stages.values():
            stage.carries(*SPREAD)
        own = [each for stage in executor.stages.values() for each in stage.module.parameters()]
        values = SpreadValues(KnownMeshes([*own, *tensors], get_mesh), gathers=False)
        driven = executor.replication
        executor.computations.hooks = ParallelHooks(driven if isinstance(driven, WrappedStages) else None, values)
        if not isinstance(driven, WrappedStages):
            executor.replication = deployment.replication = UserParallel()


def _linked(pipe: Pipeline, executor: Executor, composition: Composition) -> dict[str, AxisLink]:
    """Link this rank to its neighbours on the other axes, who have all been given the same pipeline."""
    axes, transport = composition.axes, pipe.deployment.world.transport
    assert isinstance(transport, DistributedTransport)
    links = composition.link(transport, pipe.deployment.world.timeout)
    host = _store_host(axes.mesh)
    if host is not None:
        for one in (transport, *(link.transport for link in links.values())):
            one.name_far_host(host)
    for link in links.values():
        link.describe_by(executor.progress, executor.where)
        _agree(pipe, link, composition)
    return links


def _check_spread(stages: Mapping[int, Stage], composition: Composition) -> bool:
    """Return whether the user has spread the stages already, over the tp axis; refuse what is spread otherwise."""
    mesh = composition.axes.mesh
    own = mesh["tp"].mesh.flatten().tolist() if composition.axes.size("tp") > 1 and composition.plan is None else None
    for index, stage in stages.items():
        for parameter in stage.module.parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh.mesh.flatten().tolist() != own:
                raise UsageError(
                    f"the parameters of stage {index} are spread or sharded already, by fully_shard(), DTensor or an "
                    f"earlier Pipeline, and not over the mesh's axis 'tp'; pass the model as it was built, and leave "
                    f"that to parallel_options="
                )
    return own is not None


def _sharded(executor: Executor, composition: Composition, places: Places) -> Sharder:
    """Shard the stages, but for parameters that several of them hold, scalars, and what has no numbers."""
    parts = {index: stage.part for index, stage in executor.stages.items()}
    for part in parts.values():
        part.before_sharding()
    tied = [group for group in places if len({stage for stage, _ in group}) > 1]
    whole = {parts[stage].module.get_parameter(name) for group in tied for stage, name in group if stage in parts}
    every = (each for part in parts.values() for each in part.module.parameters())
    whole |= {each for each in every if not each.dim() or not each.numel()}
    check_shardable(parts, composition.precision is not None, whole)
    return Sharder(executor, composition.axes.mesh["dp"], composition.window, composition.precision, whole)


def _store_host(mesh: Any) -> PeerFailure | None:
    """Return the failure to raise where process 0, which has the store, is gone: other ranks leave because of it."""
    places = (mesh.mesh == 0).nonzero().tolist()
    if not places:
        return None
    at = dict(zip(mesh.mesh_dim_names, places[0], strict=True))
    return PeerFailure(at.get("pp", 0), STORE_GONE, replica=at.get("dp", 0), shard=at.get("tp"))


def _agree(pipe: Pipeline, link: AxisLink, composition: Composition) -> None:
    """Check that the copies of a stage were given the same pipeline, and give them the same random numbers."""
    facts = pipe.deployment.facts()
    own = {"tensor_plan": composition.plan, "replicate": composition.replicate, "window": composition.window}
    for name, value in (own | {"shard_precision": composition.precision}).items():
        facts[name] = (str(value), "")
    answers = link.exchange((facts, pipe.deployment.counter.seed))
    faults = compared([theirs for theirs, _ in answers], link.word)
    if faults:
        raise UsageError(f"the {link.word}s were given different pipelines; pass the same on every rank\n  {faults}")
    pipe.deployment.counter.seed = answers[0][1]
