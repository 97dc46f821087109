"""Replicas that compute in low precision, and that scale their loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kept_processes import KeptProcesses
from parallel.cases import whole_of
from parallel.data_parallel.replicas import (
    KINDS,
    ROW_SHARES,
    batch,
    by_name,
    close,
    cut,
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


def loss_scaling() -> Any:
    """An overflow in one number of one rank of one replica: no process may step."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    found = {}
    for kind in KINDS:
        modules = stages()
        modules[-1].linear.weight = modules[0].linear.weight  # stays whole, beside sharded ones
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            scaler = penstock.GradScaler(pipe, init_scale=4.0)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            steps = []
            for bad in (False, True, False):
                before = [whole_of(parameter).clone() for parameter in pipe.parameters()]
                optimizer.zero_grad()
                pipe.step(x, target=y)
                if bad and dist.get_rank() == 3 and kind == "fsdp":
                    next(pipe.parameters()).grad._local_tensor[0] = float("inf")
                if bad and kind == "ddp" and mesh.get_local_rank("pp") == 1:
                    next(pipe.parameters()).grad[0] = float("inf")
                scaler.unscale_(optimizer)
                norm = pipe.clip_grad_norm_(100.0)
                scaler.step(optimizer)
                scaler.update()
                after = [whole_of(parameter) for parameter in pipe.parameters()]
                moved = any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
                steps.append((moved, scaler.get_scale(), norm.item()))
            found[kind] = steps
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_anywhere_is_found_by_all_and_nobody_steps(ranks: KeptProcesses, kind: str) -> None:
    told = ranks.found(loss_scaling)
    for rank in told:
        steps = rank[kind]
        assert [(moved, scale) for moved, scale, _ in steps] == [(True, 4.0), (False, 2.0), (True, 2.0)]
        norms = [norm for _, _, norm in steps]
        assert norms == [norm for _, _, norm in told[0][kind]] or norms[1] != norms[1]
        assert 0 < norms[0] < 1


def low_precision() -> Any:
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    found = {}
    for family in ("1f1b", "zb-v"):
        with pipeline(
            mesh,
            stages(2 if family == "1f1b" else 4),
            schedule=family,
            parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
        ) as pipe:
            result = pipe.step(x, target=y)
            dtypes = {parameter.dtype for parameter in pipe.parameters()} | {result.loss.dtype}
            found[family] = (result.loss, gradients(pipe), dtypes)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
def test_mixed_precision_computes_low_and_adds_up_high(ranks: KeptProcesses, family: str) -> None:
    told = ranks.found(low_precision)
    x, y = batch()
    modules = stages(2 if family == "1f1b" else 4)
    loss, wanted = plain(modules, x, y, F.mse_loss, ROW_SHARES)
    exact = {name: value.clone() for name, value in wanted.items()}
    for module in modules:
        module.zero_grad()
        module.bfloat16()
    total: dict[str, Tensor] = {}
    for (part, goal), share in zip([*cut(x, y, 0), *cut(x, y, 1)], ROW_SHARES, strict=True):
        out = part.bfloat16()
        for module in modules:
            out = module(out)
        (F.mse_loss(out.float(), goal) * share).backward()
        for name, parameter in nn.ModuleList(modules).named_parameters():
            total[name] = total.get(name, 0.0) + parameter.grad.float()
            parameter.grad = None
    found = by_name(told, lambda rank: rank[family][1])
    close(found, total, 1e-6)  # what is added up in bfloat16 is off by 1e-3 and more
    assert any(not torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in exact.items())
    for rank in told:
        assert rank[family][2] == {torch.float32}
        torch.testing.assert_close(rank[family][0], loss, rtol=0.02, atol=0.02)


def one_replica_in_low_precision() -> Any:
    """A mesh with a single replica: nothing to shard, but the policy counts."""
    from torch.distributed.device_mesh import init_device_mesh

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "dp"))
    x, y = batch()
    computed = []
    with pipeline(
        alone,
        schedule="1f1b",
        parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
    ) as pipe:
        for module in pipe.deployment.ranks.modules().values():
            module.linear.register_forward_hook(lambda module, args, output: computed.append(output.dtype))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(x, target=y).loss)
            dtypes = {parameter.grad.dtype for parameter in pipe.parameters()}
            optimizer.step()
            optimizer.zero_grad()
    return set(computed), dtypes, losses


@pytest.mark.slow
def test_a_policy_of_precision_counts_for_a_single_replica_too(ranks: KeptProcesses) -> None:
    modules = stages()
    loss, _ = plain(modules, *batch(), F.mse_loss, ROW_SHARES)
    for rank in ranks.found(one_replica_in_low_precision):
        computed, dtypes, losses = rank
        assert computed == {torch.bfloat16}
        assert dtypes == {torch.float32}
        torch.testing.assert_close(losses[0], loss, rtol=0.02, atol=0.02)
        assert losses[1] < losses[0]
