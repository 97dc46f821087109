"""Tied parameters stay one: on threads they are, on processes their gradients are summed once per step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model.nets import Tied, square
from processes import on_processes
from tiers import tiers
from torch import Tensor, nn

import penstock
from penstock.errors import PenstockError

SHARED = "embed.weight"


def batch(seed: int = 1) -> Tensor:
    return torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(seed))


def made(**options: Any) -> Tied:
    torch.manual_seed(0)
    return Tied(**options).double()


def piped(model: nn.Module, ranks: int, **options: Any) -> penstock.Pipeline:
    options = {"microbatches": 2, "loss_fn": square, "cut_options": penstock.CutOptions(method="replay"), **options}
    return penstock.Pipeline(model, stages=ranks, example=(batch()[:2],), **options)


def plain_step(model: nn.Module, ids: Tensor) -> None:
    for part in ids.chunk(2):
        (square(model(part)) / 2).backward()


def train(ranks: int, steps: int, schedule: str) -> dict[str, Tensor]:
    """What this process's parameters are after that many steps."""
    with piped(made(), ranks, schedule=schedule) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for step in range(steps):
            pipe.step(batch(step))
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in pipe.state_dict().items()}


def plainly(steps: int) -> dict[str, Tensor]:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        plain_step(model, batch(step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("ranks", tiers(2, 4))
def test_copies_are_bitwise_equal_after_a_hundred_steps(ranks: int) -> None:
    states = on_processes(ranks, train, ranks, 100, "1f1b")
    expected = plainly(100)
    assert torch.equal(states[0][SHARED], states[-1]["head.weight"])
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


def test_on_threads_there_is_one_parameter() -> None:
    with piped(made(), 4, schedule="zb-h1") as pipe:
        names = [name for name, _ in pipe.named_parameters()]
        assert names.count(SHARED) == 1
        assert "head.weight" not in names
        state = pipe.state_dict()
        assert state[SHARED].data_ptr() == state["head.weight"].data_ptr()
    found, expected = train(4, 20, "zb-h1"), plainly(20)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)


def norm_and_sums(ranks: int) -> tuple[float, dict[str, Tensor]]:
    """Two steps without an optimizer between them: gradients add."""
    with piped(made(), ranks) as pipe:
        pipe.step(batch(1))
        pipe.step(batch(2))
        norm = pipe.clip_grad_norm_(1e9).item()
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
        return norm, gradients


def check_norm_and_sums(ranks: int, told: list[tuple[float, dict[str, Tensor]]]) -> None:
    model = made()
    plain_step(model, batch(1))
    plain_step(model, batch(2))
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])  # type: ignore[misc]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found_norm, found in [*told, norm_and_sums(ranks)]:
        assert abs(found_norm - norm.item()) <= 1e-12 * norm.item()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-14)


def test_the_norm_counts_a_tied_parameter_once_and_steps_add(two: list[Any]) -> None:
    check_norm_and_sums(2, [rank["norm_and_sums"] for rank in two])


@pytest.mark.slow
def test_so_it_is_on_four_ranks() -> None:
    check_norm_and_sums(4, on_processes(4, norm_and_sums, 4))


def lazily(ranks: int) -> dict[str, Tensor]:
    """As `train`, for a model that each rank gives values to on its own."""
    with penstock.lazy():
        model = Tied().double()
    with piped(model, ranks, init=lambda name, tensor: nn.init.constant_(tensor, len(name) / 100)) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(3):
            pipe.step(batch(step))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in pipe.state_dict().items()}


def test_parameters_built_lazily_stay_tied_across_processes(two: list[Any]) -> None:
    """Once a rank had given its own copy values, it was no more known to be the one that other ranks had."""
    first, last = (rank["lazily"] for rank in two)
    assert torch.equal(first[SHARED], last["head.weight"])


class OneSide(Tied):
    """The head's use of the matrix is cut off from the loss."""

    def forward(self, ids: Tensor) -> Any:
        answer = super().forward(ids)
        answer.value = self.norm(self.embed(ids)) + 0 * answer.value.detach().mean()
        return answer


def one_side(ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with piped(OneSide().double(), ranks) as pipe:
        pipe.step(batch())
        return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def test_one_side_without_a_gradient_gets_the_others(two: list[Any]) -> None:
    torch.manual_seed(0)
    model = OneSide().double()
    plain_step(model, batch())
    for found in (rank["one_side"] for rank in two):
        torch.testing.assert_close(found[SHARED], model.embed.weight.grad, rtol=1e-12, atol=1e-14)


class Breaks(Tied):
    """Its last block fails when it is told to."""

    def forward(self, ids: Tensor) -> Any:
        answer = super().forward(ids)
        if int(ids[0, 0]) == 0:
            raise ValueError("a bad batch")
        return answer


def failing(ranks: int) -> bool:
    torch.manual_seed(0)
    with piped(Breaks().double(), ranks) as pipe:
        good, bad = batch() % 19 + 1, batch() * 0
        pipe.step(good)
        before = {name: copy.deepcopy(parameter.grad) for name, parameter in pipe.named_parameters()}
        with pytest.raises(PenstockError, match="a bad batch"):
            pipe.step(bad)
        tied = [parameter.grad for name, parameter in pipe.named_parameters() if name == SHARED]
        return all(torch.equal(gradient, before[SHARED]) for gradient in tied if gradient is not None)


def test_a_failed_step_leaves_the_tied_gradients_of_processes_as_they_were(two: list[Any]) -> None:
    assert [rank["failing"] for rank in two] == [True, True]


def all_of_them(ranks: int) -> dict[str, Any]:
    return {function.__name__: function(ranks) for function in (norm_and_sums, lazily, one_side, failing)}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two processes found, in one launch."""
    return on_processes(2, all_of_them, 2)
