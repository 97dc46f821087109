"""What went wrong in wrappers around a model (C2: slides of a GPipe library, CG: torchgpipe), told as tests of GPipe.

Others stand next to what they are about: tests/compat/gpipe and
tests/runtime/state/test_batch_norm.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from compat.gpipe.plain import chunked, layers, rows
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.slow
def test_the_loss_is_the_users_and_every_graph_ends_with_its_backward() -> None:
    """The loop had no target, all microbatches took one path, and the graphs of all of them stayed alive."""
    pipe = penstock.GPipe(layers(), balance=[2, 2, 2], chunks=4)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, counts = [], []
    for _ in range(6):
        loss = F.mse_loss(pipe(rows()), torch.ones(8, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
        counts.append(live_tensors())
    assert losses == sorted(losses, reverse=True)
    assert counts[1:] == counts[1:2] * 5


def test_the_backward_is_autograds_own() -> None:
    """`partition.backward()` does not exist on a module, and autograd never calls a method of that name."""
    called: list[str] = []

    class Layer(nn.Linear):
        def backward(self, *_: Any) -> None:
            called.append("backward")

    pipe = penstock.GPipe(nn.Sequential(Layer(8, 8), Layer(8, 8)), balance=[1, 1], chunks=2)
    pipe(rows()).sum().backward()
    assert not called
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_what_crosses_is_the_tensor_and_the_output_is_attached() -> None:
    """The number that a receive returned took the tensor's place. Detached copies were kept while the
    undetached tensor went on, so their gradients were None; the output was detached, and no loss reached the model."""
    seen: list[Tensor] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x * 2

    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Looks()), balance=[1, 1], chunks=2, checkpoint="never")
    y = pipe(rows())
    assert torch.equal(torch.cat(seen).detach(), chunked(pipe[0], rows(), 2).detach())
    assert all(each.requires_grad for each in seen)
    assert y.requires_grad
    y.sum().backward()
    assert pipe[0].weight.grad is not None
    assert all(each.grad is None for each in seen if each.is_leaf)  # freed after use


def test_variances_are_pooled_and_not_averaged() -> None:
    """The variances of parts were averaged, 0.73 where the whole has 6.04: what lies between means was lost."""
    x = torch.cat([torch.randn(50, 1) + shift for shift in (0.0, 5.0)])
    within = torch.stack([part.var() for part in x.chunk(2)]).mean()
    norm = nn.BatchNorm1d(1, momentum=1.0)
    penstock.GPipe(
        nn.Sequential(norm, nn.Linear(1, 1)),
        balance=[1, 1],
        chunks=2,
        batch_options=penstock.BatchOptions(batch_norm="deferred"),
    )(x)
    torch.testing.assert_close(norm.running_var, x.var().view(1))
    assert norm.running_var is not None
    assert norm.running_var > 3 * within


def test_side_information_is_cut_with_its_rows_and_one_layer_four_times_is_one_layer() -> None:
    """The dict of a batch of 32 went whole to each microbatch; one partition object stood for four."""

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, given: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
            x, info = given
            assert len(x) == len(info["shift"])
            return torch.tanh(self.layer(x)) + info["shift"].unsqueeze(1), info

    class First(nn.Module):
        def forward(self, given: tuple[Tensor, Any]) -> Tensor:
            return given[0]

    shifts = Shifts()
    model = nn.Sequential(shifts, shifts, shifts, shifts, First())
    pipe = penstock.GPipe(model, balance=[1, 1, 1, 2], chunks=3)
    given = (rows(), {"shift": torch.arange(8.0)})
    assert len(list(pipe.parameters())) == 2
    pipe(given).sum().backward()
    have = shifts.layer.weight.grad
    pipe.zero_grad()
    model(given).sum().backward()
    torch.testing.assert_close(have, shifts.layer.weight.grad)


@pytest.mark.parametrize(
    ("sizes", "stages", "largest"), [([5] * 7 + [50], 2, 50), ([10] * 6 + [40, 10], 3, 50), ([3, 1, 1, 1, 1, 1], 2, 4)]
)
def test_the_heaviest_stage_is_as_light_as_can_be(sizes: list[int], stages: int, largest: int) -> None:
    """Costs had their minimum taken off first, and [5]*7+[50] in two had a stage of 65 for 50."""
    model = nn.Sequential(*[nn.Linear(size, 1, bias=False) for size in sizes])
    balance = penstock.GPipe(model, balance=stages).balance
    assert balance is not None
    ends = [sum(balance[: place + 1]) for place in range(stages)]
    starts = [0, *ends[:-1]]
    assert max(sum(sizes[start:end]) for start, end in zip(starts, ends, strict=True)) == largest
