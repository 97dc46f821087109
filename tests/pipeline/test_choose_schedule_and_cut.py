"""schedule="auto" with balance="time": cut, ranks and order come from one search."""

from __future__ import annotations

import pytest
import torch
from processes import on_processes
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError
from penstock.model.balance.profile import Weight
from penstock.pipeline.choose_schedule import SearchedCut
from penstock.schedule import lower, verify


def pieces(*times: float) -> list[Weight]:
    return [Weight(str(number), milliseconds=time, activation_bytes=10) for number, time in enumerate(times)]


def test_the_cut_follows_the_times_and_the_schedule_is_for_it() -> None:
    auto = SearchedCut(8, 2, None)
    assert auto.schedule(8) is None
    cuts = auto.cuts(2, pieces(9, 3, 3, 3), None)
    assert cuts == [1]
    schedule = auto.schedule(8)
    assert schedule is not None
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 2, 8)
    other = auto.schedule(5)
    assert other is not None
    assert other.placement == schedule.placement
    verify(lower(other))


def test_pieces_that_stay_together_are_one_layer() -> None:
    cuts = SearchedCut(4, 2, None).cuts(2, pieces(1, 9, 1, 1, 1), [2, 4])
    assert cuts == [2]
    with pytest.raises(ModelError, match="3 stages at most"):
        SearchedCut(4, 2, None).cuts(4, pieces(1, 9, 1, 1, 1), [2, 4])


def test_a_slow_rank_gets_fewer_pieces() -> None:
    auto = SearchedCut(8, 2, [1.0, 0.5])
    (cut,) = auto.cuts(2, pieces(*[1] * 6), None)
    schedule = auto.schedule(8)
    assert schedule is not None
    counts = dict(zip(schedule.placement, (cut, 6 - cut), strict=True))  # the slow rank may also come first
    assert counts == {0: 4, 1: 2}


def test_stages_need_not_fill_the_ranks_evenly() -> None:
    auto = SearchedCut(6, 2, None)
    assert len(auto.cuts(5, pieces(*[1] * 10), None)) == 4
    schedule = auto.schedule(6)
    assert schedule is not None
    assert sorted(len(schedule.placement.stages_of(rank)) for rank in range(2)) == [2, 3]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]).double()


def test_a_pipeline_trains_with_it() -> None:
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    plain = model()
    with penstock.Pipeline(
        model(),
        stages=5,
        ranks=2,
        microbatches=4,
        schedule="auto",
        balance="time",
        example=(x[:2],),
        loss_fn=F.mse_loss,
    ) as pipe:
        for _ in range(2):
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, target=y).loss, loss.detach(), rtol=1e-12, atol=1e-12)
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def on_a_rank() -> tuple[list[float], list[str], str]:
    """Two steps of a model whose first layers are heavy: losses, own parameters, and the schedule that was found."""
    torch.manual_seed(0)
    heavy = [nn.Linear(600, 600) for _ in range(2)]
    layers = nn.Sequential(*heavy, nn.Linear(600, 8), *[nn.Linear(8, 8) for _ in range(9)]).double()
    torch.manual_seed(1)
    x, y = torch.randn(8, 600, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    with penstock.Pipeline(
        layers, stages=5, microbatches=4, schedule="auto", balance="time", example=(x[:2],), loss_fn=F.mse_loss
    ) as pipe:
        losses = [pipe.step(x, target=y).loss.item() for _ in range(2)]
        assert pipe.schedule.name == "auto"
        return losses, [name for name, _ in pipe.named_parameters()], pipe.schedule.draw()


@pytest.mark.slow
def test_two_processes_search_once_and_train_alike() -> None:
    """The first rank measures; five stages on two ranks can only come from the search for cut and order together."""
    first, second = on_processes(2, on_a_rank)
    assert first[0] == second[0]
    assert first[2] == second[2]
    assert not {*first[1]} & {*second[1]}
    assert len({*first[1], *second[1]}) == 24
    torch.manual_seed(0)
    heavy = [nn.Linear(600, 600) for _ in range(2)]
    plain = nn.Sequential(*heavy, nn.Linear(600, 8), *[nn.Linear(8, 8) for _ in range(9)]).double()
    torch.manual_seed(1)
    x, y = torch.randn(8, 600, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    assert first[0] == pytest.approx([F.mse_loss(plain(x), y).item()] * 2, rel=1e-12)
