"""Between a step and the next: norms and clipping over all ranks, ordinary optimizers, the same groups everywhere.

One group of three processes runs all scenarios; each returns what its rank saw, and the tests look at that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deadlines import TIMEOUT
from processes import on_processes
from runtime.optim.tied_net import WIDTH, batch, loss_of, model, piped
from torch import Tensor, nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import PeerFailure, PenstockError, RunError, UsageError

LIMIT = 0.01
OF_A_TABLE = ["train_steps", "clip_grad_norm_", "grad_norm"]
ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf, "inf", -math.inf, -1.0]


def plain_gradients(net: nn.Module, factor: float = 1.0) -> None:
    ids, target = batch()
    for part, goal in zip(ids.chunk(2), target.chunk(2), strict=True):
        (loss_of(net(part), goal) / 2 * factor).backward()


def sparse_stages() -> list[nn.Module]:
    """The middle rank owns no parameter."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]


def attempt(function: Callable[[], Any]) -> tuple[type, str]:
    try:
        function()
    except (PenstockError, RuntimeError) as error:
        return type(error), str(error)
    return type(None), "no error"


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


def clipped(foreach: bool | None) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """By order, the norm of one step's gradients, and what they are once they are clipped."""
    with piped() as pipe:
        ids, target = batch()
        pipe.step(ids, target=target)
        before = [(parameter, parameter.grad) for parameter in pipe.parameters()]
        found = []
        for order in ORDERS:
            for parameter, gradient in before:
                parameter.grad = None if gradient is None else gradient.clone()
            found.append((pipe.clip_grad_norm_(LIMIT, order, foreach=foreach), gradients(pipe)))
        return found


def not_finite() -> dict[str, Any]:
    """One entry of one rank's gradient is not a number: every rank hears of it."""
    with piped() as pipe:
        ids, target = batch()
        pipe.step(ids, target=target)
        for name, parameter in pipe.named_parameters():
            if name == "linear.bias" and parameter.grad is not None:
                parameter.grad[0] = math.inf
        before = gradients(pipe)
        error = attempt(lambda: pipe.clip_grad_norm_(1.0, error_if_nonfinite=True))
        untouched = all(torch.equal(before[name], value) for name, value in gradients(pipe).items())
        return {"error": error, "untouched": untouched, "norm": pipe.clip_grad_norm_(1.0)}


def of_a_table(how: str, transport: str) -> tuple[type, str]:
    """One rank has an embedding whose gradients are sparse."""
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    ids, target = torch.arange(8) % 4, torch.randn(8, WIDTH)
    options = {"microbatches": 2, "loss_fn": F.mse_loss, "timeout": TIMEOUT, "transport": transport}
    with penstock.Pipeline([nn.Embedding(4, WIDTH, sparse=True), *stages], **options) as pipe:
        if how == "train_steps":
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            return attempt(lambda: list(pipe.train_steps([(ids, target)] * 3, optimizer, clip=1.0)))
        pipe.step(ids, target=target)
        return attempt(lambda: pipe.clip_grad_norm_(1.0) if how == "clip_grad_norm_" else pipe.grad_norm())


def by_value() -> dict[str, Tensor]:
    with piped() as pipe:
        ids, target = batch()
        pipe.step(ids, target=target)
        pipe.clip_grad_value_(0.01)
        return gradients(pipe)


def poor() -> dict[str, Any]:
    """Optimizers, groups and schedulers where a rank owns nothing; the norm has the others' dtype there too."""
    with penstock.Pipeline(sparse_stages(), microbatches=2, loss_fn=F.mse_loss, timeout=20) as pipe:
        pipe.deployment.staged.parts[0].module.double()
        pipe.deployment.staged.parts[2].module.double()
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        plain = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        grouped = torch.optim.AdamW(pipe.parameter_groups({"*.bias": {"weight_decay": 0.0, "lr": 0.5}}), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(grouped, total_iters=4)
        dtypes = []
        for _ in range(2):
            pipe.step(x, target=x)
            dtypes.append(pipe.clip_grad_norm_(1.0).dtype)
            pipe.clip_grad_value_(0.5)
            plain.step()
            grouped.step()
            scheduler.step()
            pipe.zero_grad()
        return {
            "lr": scheduler.get_last_lr(),
            "groups": [group["name"] for group in grouped.param_groups],
            "dtypes": dtypes,
            "numbers": sum(p.numel() for p in pipe.parameters()),
            "state": {name: value.clone() for name, value in pipe.state_dict().items()},
        }


RULES = {
    ("*norm*", "*.bias"): {"weight_decay": 0.0},
    re.compile("^embed"): {"lr": 0.05},
}


def trained(stages: int) -> dict[str, Any]:
    """Which group each parameter is in, and what two steps make of it."""
    with piped(stages=stages) as pipe:
        groups = pipe.parameter_groups(RULES)
        names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        found = {names[id(parameter)]: group["name"] for group in groups for parameter in group["params"]}
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        for step in range(2):
            ids, target = batch(step)
            pipe.step(ids, target=target)
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return {"groups": found, "state": {name: value.clone() for name, value in pipe.state_dict().items()}}


def at_odds() -> tuple[type, str]:
    """Rank 0 clips while the others evaluate."""
    with piped() as pipe:
        if pipe.deployment.ranks.executors.keys() == {0}:
            return attempt(lambda: pipe.clip_grad_norm_(1.0))
        return attempt(lambda: pipe.evaluate(batch()[0]))


def on_a_rank() -> dict[str, Any]:
    return {
        "clipped": clipped(None),
        "not finite": not_finite(),
        "by value": by_value(),
        "poor": poor(),
        "trained": trained(3),
        "at odds": at_odds(),
        "sparse": {(how, transport): of_a_table(how, transport) for how in OF_A_TABLE for transport in ON_PROCESSES},
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = on_processes(3, on_a_rank)
    return found


@pytest.fixture(scope="module")
def on_threads() -> list[list[tuple[Tensor, dict[str, Tensor]]]]:
    return [clipped(None), clipped(False)]


@pytest.mark.parametrize("number", range(len(ORDERS)), ids=lambda number: str(ORDERS[number]))
def test_the_norm_is_that_of_one_process_and_a_tied_parameter_counts_once(
    number: int, on_threads: list[Any], ranks: list[dict[str, Any]]
) -> None:
    net = model()
    plain_gradients(net)
    wanted = nn.utils.clip_grad_norm_(net.parameters(), LIMIT, float(ORDERS[number]))
    expected = {name: p.grad for name, p in net.named_parameters()}
    for norm, found in [each[number] for each in (*on_threads, *(rank["clipped"] for rank in ranks))]:
        assert norm.dtype is torch.float64
        assert abs(norm.item() - wanted.item()) <= 1e-12 * wanted.item()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-15)


def test_a_norm_of_order_zero_counts_over_all_ranks() -> None:
    from penstock.runtime.optim.norms import join_norms

    assert join_norms([(2.0, torch.float32), None, (3.0, torch.float32)], 0.0).item() == 5.0


def test_the_norm_is_read_without_clipping() -> None:
    with piped() as pipe:
        ids, target = batch()
        pipe.step(ids, target=target)
        before = gradients(pipe)
        norm = pipe.grad_norm()
        assert all(torch.equal(before[name], value) for name, value in gradients(pipe).items())
        assert torch.equal(pipe.clip_grad_norm_(1e-3), norm)
        assert pipe.grad_norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_without_gradients_the_norm_is_zero() -> None:
    with piped() as pipe:
        assert pipe.clip_grad_norm_(1.0).item() == 0.0


def test_every_rank_refuses_a_norm_that_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    for seen in [not_finite(), *(rank["not finite"] for rank in ranks)]:
        kind, text = seen["error"]
        assert kind is RunError
        assert "norm of order 2 of all gradients is inf" in text
        assert seen["untouched"]
        assert seen["norm"].item() == math.inf


@pytest.mark.parametrize("transport", ON_PROCESSES)
@pytest.mark.parametrize("how", OF_A_TABLE)
def test_every_rank_refuses_the_norm_of_sparse_gradients(how, transport, ranks):
    """torch has none. It was an error of its own on the rank that has them, and the others took that rank for lost."""
    (kind, said), *others = [rank["sparse"][how, transport] for rank in ranks]
    assert kind is UsageError
    assert "the gradient of 0.weight is sparse" in said
    assert others == [(kind, said)] * 2


def test_values_of_sparse_gradients_are_not_clamped() -> None:
    with penstock.Pipeline([nn.Embedding(4, WIDTH, sparse=True)], microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(torch.arange(4), target=torch.randn(4, WIDTH))
        with pytest.raises(UsageError, match=re.escape("the gradient of 0.weight is sparse")):
            pipe.clip_grad_value_(1.0)


def test_values_are_clamped(ranks: list[dict[str, Any]]) -> None:
    net = model()
    plain_gradients(net)
    nn.utils.clip_grad_value_(net.parameters(), 0.01)
    expected = {name: p.grad for name, p in net.named_parameters()}
    for found in [by_value(), *(rank["by value"] for rank in ranks)]:
        assert found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-15)


def test_a_limit_that_would_turn_gradients_around_is_refused() -> None:
    with piped() as pipe:
        limits: list[Any] = [-1.0, math.nan, "1", None, True]
        for limit in limits:
            with pytest.raises(UsageError, match=f"max_norm={limit!r}"):
                pipe.clip_grad_norm_(limit)
            with pytest.raises(UsageError, match=f"clip_value={limit!r}"):
                pipe.clip_grad_value_(limit)
        with pytest.raises(UsageError, match="norm_type='two'"):
            pipe.clip_grad_norm_(1.0, "two")


def test_ranks_in_different_calls_are_told_apart(ranks: list[dict[str, Any]]) -> None:
    for kind, text in (rank["at odds"] for rank in ranks):
        assert kind is PeerFailure
        assert "clip_grad_norm_(1)" in text
        assert "evaluate()" in text


def test_a_rank_without_parameters_has_an_optimizer_like_the_others(ranks: list[dict[str, Any]]) -> None:
    threads, processes = poor(), [rank["poor"] for rank in ranks]
    assert [seen["numbers"] for seen in processes] == [42, 0, 42]
    state = {name: value for seen in processes for name, value in seen["state"].items()}
    assert all(torch.equal(state[name], value) for name, value in threads["state"].items())
    for seen in processes:
        assert seen["lr"] == threads["lr"]
        assert seen["groups"] == ["*.bias", "rest"]
        assert seen["dtypes"] == [torch.float64] * 2


def test_groups_are_the_same_at_any_number_of_stages(ranks: list[dict[str, Any]]) -> None:
    net = model()
    groups = penstock.parameter_groups(net, RULES)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    expected = {names[id(parameter)]: group["name"] for group in groups for parameter in group["params"]}
    assert expected == {
        "embed.weight": "^embed",
        "norm.weight": "*norm*, *.bias",
        "norm.bias": "*norm*, *.bias",
        "linear.weight": "rest",
        "linear.bias": "*norm*, *.bias",
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for step in range(2):
        ids, target = batch(step)
        for part, goal in zip(ids.chunk(2), target.chunk(2), strict=True):
            (loss_of(net(part), goal) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    state = net.state_dict()
    for seen in [trained(1), trained(2), trained(3), *(rank["trained"] for rank in ranks)]:
        for name, group in seen["groups"].items():
            assert group == expected.get(name, expected["embed.weight"])  # the head is tied to it
        for name, value in seen["state"].items():
            torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-12)
