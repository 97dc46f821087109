"""What replicas promise beside exact gradients: one reduction, right weights, right norms, right names."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exactness.models import example
from kept_processes import KeptProcesses
from parallel.cases import Case, plain_step, tie, untied
from parallel.data_parallel.replicas import (
    KINDS,
    ROW_SHARES,
    ROWS,
    WIDTH,
    M,
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
from torch.nn import functional as F

import penstock
from penstock import LossOptions, ParallelOptions


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    """Replica 0 and 1 of rank 0, then of rank 1."""
    with KeptProcesses(4) as kept:
        yield kept


def reductions() -> Any:
    """What is reduced in a step, counted where torch does it."""
    mesh = penstock.mesh(pp=2, dp=2)
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def counts(*args: Any, **kwargs: Any) -> Any:
            counted[name] += max(each.numel() for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            return function(*args, **kwargs)

        return counts

    found = {}
    names = ("all_reduce", "reduce_scatter_single")
    kept = {name: getattr(dist, name) for name in names}
    x, y = own(mesh, *batch())
    for kind in KINDS:
        for family in ("zb-v", "looped-bfs", "dualpipe-v", "zb-h1", "1f1b"):
            modules = stages(2 if family in ("zb-h1", "1f1b") else 4)
            modules[-1].linear.weight = modules[0].linear.weight  # tied: on zb-v between two stages of one rank
            with pipeline(mesh, modules, schedule=family, parallel_options=ParallelOptions(replicate=kind)) as pipe:
                pipe.step(x, target=y)
                counted.clear()
                for name in names:
                    setattr(dist, name, counting(name, kept[name]))
                try:
                    pipe.step(x, target=y)
                finally:
                    for name in names:
                        setattr(dist, name, kept[name])
                size = sum(parameter.numel() for parameter in pipe.parameters())
                found[kind, family] = (dict(counted), size)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_reduced_exactly_once_a_step_under_every_kind_of_schedule(
    ranks: KeptProcesses, kind: str
) -> None:
    for rank in ranks.found(reductions):
        for (which, family), (counted, size) in rank.items():
            if which == kind:
                whole = counted.get("all_reduce", 0)
                sharded = counted.get("reduce_scatter_single", 0)
                assert whole + sharded == size, (family, counted)
                assert (sharded > 0) == (kind == "fsdp"), (family, counted)


def clipping() -> Any:
    mesh = penstock.mesh(pp=2, dp=2)
    found = {}
    for kind in KINDS:
        for norm_type in (2.0, float("inf"), 1.0):
            made = example("transformer", 4, ROWS, torch.float64)
            tie(made.stages)
            ids, target = own(mesh, made.args[0], made.target)
            with pipeline(
                mesh, made.stages, loss_fn=made.loss_fn, parallel_options=ParallelOptions(replicate=kind), seed=11
            ) as pipe:
                pipe.step(ids, target=target)
                norm = pipe.clip_grad_norm_(0.01, norm_type)
                found[kind, norm_type] = (norm, gradients(pipe))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_norms_count_sharded_tied_and_replicated_gradients_once(
    ranks: KeptProcesses, kind: str, norm_type: float
) -> None:
    told = ranks.found(clipping)
    case = Case("zb-v", "ddp", "tied", rows=(ROWS // 2, ROWS // 2))
    made = case.made()
    for module in made.stages:
        module.double()
    made.args = (made.args[0],)
    whole = nn.ModuleList(made.stages)
    plain_step(made, case, 0, list(whole.parameters()))
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
    norms = [rank[kind, norm_type][0] for rank in told]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0], wanted, rtol=1e-10, atol=0)
    found = by_name(told, lambda rank: rank[kind, norm_type][1])
    found = {untied(name, case): value for name, value in found.items()}
    close(found, {name: parameter.grad for name, parameter in whole.named_parameters()}, 1e-10)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows that count."""
    counted = target[:, 0] != -100
    return F.mse_loss(output[counted], target[counted])


def weights() -> Any:
    """Tokens, not rows: of the second replica's target only one row counts, or none."""
    mesh = penstock.mesh(pp=2, dp=2)
    found = {}
    x, y = batch()
    for counting in (1, 0):
        target = y.clone()
        target[ROWS // 2 + counting :] = -100
        mine, wanted = own(mesh, x, target)
        for kind in KINDS:
            with pipeline(
                mesh,
                loss_fn=token_loss,
                loss_options=LossOptions(weight=lambda target: (target[:, 0] != -100).sum()),
                parallel_options=ParallelOptions(replicate=kind),
            ) as pipe:
                result = pipe.step(mine, target=wanted)
                found[kind, counting] = (result.loss, gradients(pipe))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counting", [1, 0])
def test_replicas_weigh_by_tokens_and_one_without_any_adds_nothing(
    ranks: KeptProcesses, kind: str, counting: int
) -> None:
    told = ranks.found(weights)
    x, y = batch()
    y[ROWS // 2 + counting :] = -100
    tokens = [(goal[:, 0] != -100).sum().item() for half in (0, 1) for _, goal in cut(x, y, half)]
    loss, wanted = plain(stages(), x, y, token_loss, [count / sum(tokens) for count in tokens])
    for rank in told:
        torch.testing.assert_close(rank[kind, counting][0], loss)
    close(by_name(told, lambda rank: rank[kind, counting][1]), wanted)


class Balanced(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        penstock.add_loss("balance", out.pow(2).mean())
        return out


def extra_losses() -> Any:
    mesh = penstock.mesh(pp=2, dp=2)
    found = {}
    x, y = own(mesh, *batch())
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        with pipeline(
            mesh,
            [Balanced(WIDTH, WIDTH), Balanced(WIDTH, WIDTH)],
            schedule="1f1b",
            loss_options=LossOptions(reduction=reduction),
            parallel_options=ParallelOptions(replicate="ddp"),
            loss_fn=functools.partial(F.mse_loss, reduction=reduction),
        ) as pipe:
            result = pipe.step(x, target=y)
            found[reduction] = (result.loss, dict(result.extra_losses), gradients(pipe))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_named_losses_are_means_over_the_microbatches_of_all_replicas(ranks: KeptProcesses, reduction: str) -> None:
    told = ranks.found(extra_losses)
    x, y = batch()
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    shares = ROW_SHARES if reduction == "mean" else [1.0] * 2 * M
    total, balance = torch.zeros(()), 0.0
    for (part, goal), share in zip([*cut(x, y, 0), *cut(x, y, 1)], shares, strict=True):
        first = modules[0](part)
        second = modules[1](first)
        extra = (first.pow(2).mean() + second.pow(2).mean()) / (2 * M)
        loss = F.mse_loss(second, goal, reduction=reduction) * share
        (loss + extra).backward()
        total, balance = total + loss.detach(), balance + extra.item()
    for rank in told:
        loss, extra, _ = rank[reduction]
        torch.testing.assert_close(loss, total)
        assert extra == {"balance": pytest.approx(balance, rel=1e-6)}
    found = by_name(told, lambda rank: rank[reduction][2])
    close(found, {name: p.grad for name, p in nn.ModuleList(modules).named_parameters()}, 1e-5)
