"""What sets replicas apart, or cannot be one pipeline, is refused on all of them by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kept_processes import KeptProcesses
from parallel.data_parallel.replicas import (
    KINDS,
    ROW_SHARES,
    WIDTH,
    Layer,
    M,
    attempt,
    batch,
    by_name,
    close,
    gradients,
    own,
    pipeline,
    plain,
    stages,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import penstock
from penstock import ParallelOptions


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    """Replica 0 and 1 of rank 0, then of rank 1."""
    with KeptProcesses(4) as kept:
        yield kept


def train_with(pipe: penstock.Pipeline, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    pipe.step(x, target=y)
    expected = {name: parameter - 0.1 * parameter.grad for name, parameter in pipe.named_parameters()}
    optimizer.step()
    for name, parameter in pipe.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=1e-6, atol=0), name


def made_and_closed(*args: Any, **options: Any) -> None:
    pipeline(*args, **options).close()


def unscale(pipe: penstock.Pipeline, x: Tensor, y: Tensor, scale: float) -> None:
    scaler = penstock.GradScaler(pipe, init_scale=scale)
    pipe.step(x, target=y)
    scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))


def set_apart() -> Any:
    """What a loop can do to set the copies of a stage apart, without any shape that does not fit."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    second = mesh.get_local_rank("dp") == 1
    found: dict[str, Any] = {"optimizers": []}
    for kind in KINDS:
        modules = stages()
        before = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            found["optimizers"].append(attempt(train_with, pipe, x, y, before))
            pipe.zero_grad()
            for name, parameter in pipe.named_parameters():  # as many on both replicas, and not the same
                parameter.requires_grad_(name.endswith("bias" if second else "weight"))
            found[f"trained {kind}"] = attempt(pipe.step, x, target=y)
            for parameter in pipe.parameters():
                parameter.requires_grad_(True)
            found[f"scales {kind}"] = attempt(unscale, pipe, x, y, 8.0 if second else 4.0)
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            for module in pipe.deployment.ranks.modules().values():
                module.linear = nn.Linear(WIDTH, WIDTH)
            found[f"exchanged {kind}"] = attempt(pipe.step, x, target=y)
        modules = stages()
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            pipe.zero_grad()
            if not second:  # as in `if rank == 0: load`
                pipe.load_state_dict({name: value + 1 for name, value in nn.ModuleList(stages()).state_dict().items()})
            found[f"loaded {kind}"] = attempt(pipe.step, x, target=y)
        found[f"elsewhere {kind}"] = attempt(
            made_and_closed, mesh, [each.linear for each in modules], parallel_options=ParallelOptions(replicate=kind)
        )
        modules = stages()
        made_and_closed(mesh, modules, parallel_options=ParallelOptions(replicate=kind))
        found[f"again {kind}"] = attempt(
            made_and_closed, mesh, [each.linear for each in modules], parallel_options=ParallelOptions(replicate=kind)
        )
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
            pipe.step(x, target=y)
            if second or kind == "fsdp":  # a shard is nobody else's: there is nothing to differ from
                optimizer.step()
            found[f"stepped {kind}"] = attempt(pipe.step, x, target=y)
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.mul_(1.5 if second else 1)
            found[f"scaled {kind}"] = attempt(pipe.step, x, target=y)
            for parameter in pipe.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)
            found[f"hooked {kind}"] = attempt(pipe.step, x, target=y)
        with pipeline(mesh, stages(2), schedule="1f1b", parallel_options=ParallelOptions(replicate=kind)) as pipe:
            other = y + mesh.get_local_rank("pp")  # rows by the number in the world: each rank has its own
            found[f"targets {kind}"] = attempt(pipe.step, x, target=other)
            found[f"then {kind}"] = all(parameter.grad is None for parameter in pipe.parameters())
    return found


@pytest.mark.slow
def test_an_optimizer_of_all_of_the_models_parameters_trains_those_of_the_rank_unless_they_are_sharded(
    ranks: KeptProcesses,
) -> None:
    for rank in ranks.found(set_apart):
        plainly, sharded = rank["optimizers"]
        assert plainly[:2] == ("", "")
        assert sharded[0] == "UsageError"
        assert "this SGD was made before the Pipeline" in sharded[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_cannot_set_replicas_apart_without_a_word(ranks: KeptProcesses, kind: str) -> None:
    for rank in ranks.found(set_apart):
        said = {name: rank[f"{name} {kind}"] for name in ("trained", "scales", "exchanged", "targets")}
        for name in ("trained", "exchanged"):
            assert said[name][0] in ("UsageError", "PeerFailure")
        assert "the replicas train different parameters of rank" in said["trained"][1]
        assert "(replica 0: 2, replica 1: 2 of 4)" in said["trained"][1]
        assert said["scales"][0] == "UsageError"
        assert "(rank 0: 4 and 8, rank 1: 4 and 8)" in said["scales"][1]
        assert "2 parameters are not those that the pipeline was made with" in said["exchanged"][1] or (
            "4 parameters are not those" in said["exchanged"][1]
        )
        assert said["targets"][0] == "ModelError"
        assert "the ranks were given different batches ('target': rank 0 has" in said["targets"][1]
        assert rank[f"then {kind}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_drift_apart_are_noticed_in_the_next_step(ranks: KeptProcesses, kind: str) -> None:
    for rank in ranks.found(set_apart):
        names = ("loaded", "stepped", "scaled", "hooked", "again", "elsewhere")
        loaded, stepped, scaled, hooked, again, elsewhere = (rank[f"{name} {kind}"] for name in names)
        assert elsewhere[0] == "ModelError"
        assert "another Pipeline trains Linear" in elsewhere[1]
        assert loaded[0] == "UsageError"
        assert "the replicas have loaded different states, or not all of them have loaded one" in loaded[1]
        if kind == "ddp":
            assert (stepped[0], again[0]) == ("UsageError", "")
            assert "parameters were changed in some replicas only (replica 0: no, replica 1: yes)" in stepped[1]
            assert "has other values in other replicas (replica 0: [" in scaled[1]
            assert "so they train apart" in hooked[1]  # still
        else:
            assert (stepped[0], hooked[0], again[0]) == ("", "UsageError", "UsageError")
            assert "which ParallelOptions(replicate='fsdp') cannot call" in hooked[1]
            assert "are spread or sharded already" in again[1]


def refused() -> Any:
    """Replicas that were given different pipelines, and what cannot be."""
    mesh = penstock.mesh(pp=2, dp=2)
    second = mesh.get_local_rank("dp") == 1
    sparse = [nn.Sequential(nn.Embedding(5, WIDTH, sparse=True)), Layer()]
    mixed = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()), Layer()]
    ids = torch.arange(4)
    tied = stages(2)
    tied[1].linear.weight = tied[0].linear.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    turned = stages(2)
    turned[1].linear.weight.data = turned[1].linear.weight.data.t().contiguous().t()
    found = [
        attempt(pipeline, mesh, microbatches=M + second, parallel_options=ParallelOptions(replicate="ddp")),
        attempt(pipeline, mesh, parallel_options=ParallelOptions(replicate="fsdp" if second else "ddp")),
        attempt(pipeline, mesh, mixed, schedule="1f1b", parallel_options=ParallelOptions(replicate="fsdp")),
        attempt(
            pipeline,
            mesh,
            tied,
            schedule="1f1b",
            parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
        ),
        attempt(pipeline, mesh, turned, schedule="1f1b", parallel_options=ParallelOptions(replicate="fsdp")),
        attempt(penstock.mesh, 3, 2),
        attempt(penstock.mesh, 3, -1),
    ]
    with pipeline(mesh, sparse, schedule="1f1b", parallel_options=ParallelOptions(replicate="ddp")) as pipe:
        found.append(attempt(pipe.step, ids, target=torch.zeros(4, WIDTH)))
    return found


@pytest.mark.slow
def test_what_cannot_work_is_refused_by_name(ranks: KeptProcesses) -> None:
    told = ranks.found(refused)
    for place, rank in enumerate(told):
        counts, kinds, mixed, tied, turned, product, rest, sparse = rank
        assert counts[0] == kinds[0] == product[0] == rest[0] == "UsageError"
        assert "microbatches: replica 1 has 5, replica 0 has 4" in counts[1]
        assert "replicate: replica 1 has fsdp, replica 0 has ddp" in kinds[1]
        assert mixed[0] == ("ModelError" if place < 2 else "PeerFailure")
        assert "stage 0 has trained parameters of torch.float32 and torch.float64" in mixed[1]
        assert tied[0] == "ModelError"
        assert "tied across stages" in tied[1]
        assert turned[0] == ("PeerFailure" if place < 2 else "ModelError")
        assert "1.linear.weight of stage 1 has shape (6, 6) with strides (1, 6)" in turned[1]
        assert "pp=3 x dp=2 x tp=1 = 6 processes, but there are 4" in product[1]
        assert "pp=3 x tp=1 = 3 does not divide the 4 processes" in rest[1]
        assert sparse[0] == "PeerFailure"
        assert "the gradient of 0.0.weight is sparse" in sparse[1]


def own_meshes() -> Any:
    """DeviceMeshes that the user made: other orders of axes, a part of a larger one, none that is the pipeline's."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    x, y = batch()
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    strange = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "experts"))
    nameless = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    crossed = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "pp"))
    found = [attempt(pipeline, given, schedule="1f1b", modules=stages(2)) for given in (strange, nameless, crossed)]
    found.append(
        attempt(
            pipeline,
            strange["pp"],
            schedule="1f1b",
            modules=stages(2),
            parallel_options=ParallelOptions(replicate="ddp"),
        )
    )
    with pipeline(turned) as pipe:  # with a dp axis, replicas are the default
        result = pipe.step(*own(turned, x), target=own(turned, y)[0])
        words = pipe.describe()
        return found, result.loss, gradients(pipe), pipe.composition.replicate, words


@pytest.mark.slow
def test_meshes_of_the_users_own(ranks: KeptProcesses) -> None:
    told = ranks.found(own_meshes)
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    for rank in told:
        (strange, nameless, crossed, part), found, _, kind, words = rank
        assert (strange[0], nameless[0], crossed[0], part[0]) == ("UsageError",) * 4
        assert "along the mesh's axis 'dp' the processes do not stand in the order of their numbers" in crossed[1]
        assert "axes ('pp', 'experts'), and a pipeline knows ('pp', 'dp', 'tp')" in strange[1]
        assert "axes ('a', 'b'); name the pipeline's axis 'pp'" in nameless[1]
        assert "add an axis 'dp'" in part[1]
        torch.testing.assert_close(found, loss)
        assert kind == "ddp"
        assert "beside    2 replicas, each with all parameters of its stages" in words
    close(by_name(told, lambda rank: rank[2]), wanted)
