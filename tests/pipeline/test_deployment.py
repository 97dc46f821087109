"""Schedules that follow the batch: an order of microbatches made for their sizes, and what is kept of it."""

from __future__ import annotations

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.pipeline.deployment import KEPT, Programs
from penstock.schedule import build, lower

WIDTH, LONGEST = 6, 32


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class Classify(Mix):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        out: Tensor = self.mix((x * valid).sum(1) / lengths[:, None])
        return out


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [module.double() for module in (Embed(), Mix(), Mix(), Classify())]


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    lengths = torch.tensor([32, 30, 2, 1, 1, 8, 9, 3, 31, 4, 5, 2])[torch.randperm(12, generator=made)]
    ids = torch.randint(0, 10, (12, LONGEST), generator=made)
    return ids, lengths, torch.randint(0, WIDTH, (12,), generator=made)


def trained_by_size(schedule: str, on_each: int) -> list[list[int]]:
    """Two steps in an order made for the sizes, compared with a plain loop; the order of rank 0's forwards in each."""
    options = penstock.BatchOptions(split=penstock.by_tokens(33), order="size")
    reference = nn.ModuleList(stages())
    chosen: list[list[int]] = []
    with penstock.Pipeline(
        stages(),
        ranks=4 // on_each,
        microbatches=2,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        batch_options=options,
    ) as pipe:
        for step in range(2):
            ids, lengths, classes = batch(step)
            result = pipe.step(ids, lengths=lengths, target=classes)
            x = ids
            for stage in reference:
                x = stage(x, lengths)
            loss = F.cross_entropy(x, classes)
            loss.backward()
            torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-12)
            row = pipe.schedule.rank(0)
            chosen.append([part.microbatch for part in row if part is not None and part.op == 0 and part.stage == 0])
            assert sorted(chosen[-1]) == list(range(pipe.microbatches))
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
        found = list(pipe.named_parameters())
        assert found
        for name, parameter in found:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-12)
    return chosen


def test_microbatches_run_in_an_order_made_for_their_sizes_and_gradients_are_the_same() -> None:
    orders = {schedule: trained_by_size(schedule, on_each=1) for schedule in ("zb-h1", "1f1b")}
    assert all(order != sorted(order) for order in orders["1f1b"])  # zb-h1 has no better one than the given


def on_a_rank() -> dict[str, list[list[int]]]:
    return {schedule: trained_by_size(schedule, on_each=2) for schedule in ("zb-v", "interleaved-1f1b")}


@pytest.mark.slow
def test_processes_agree_on_the_order_and_gradients_are_those_of_a_plain_loop() -> None:
    """Each process makes the order by itself, from the sizes that all of them know."""
    first, second = on_processes(2, on_a_rank)
    assert first == second
    assert any(order != sorted(order) for orders in first.values() for order in orders)


def test_only_the_last_few_orders_are_kept_and_equal_sizes_have_the_given_one() -> None:
    given = build("zb-v", 2, 6)
    programs = Programs(given, lambda count: build("zb-v", 2, count), lower, lambda always: ())
    assert not programs.take(6)
    for size in range(3, KEPT + 10):
        programs.take(6, (size, 1, 1, size, 1, 2))
    assert len(programs._sized) == KEPT
    assert programs.schedule != given
    assert programs.take(6, (7, 7, 7, 7, 7, 7))
    assert programs.schedule == given
    assert programs.take(5)
    assert programs.microbatches == 5
    assert programs.take(6)
    assert programs.schedule == given
