"""Batch norms that normalise a batch as a whole, whatever microbatches it goes through in, and over replicas."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from runtime.engine.whole_batches import EXACT, ROWS, batch, network, plain_run, state_of, train
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, UsageError


def assert_close(found: nn.Module, wanted: dict[str, Tensor]) -> None:
    state = state_of(found)
    assert set(state) == set(wanted)
    for name, want in wanted.items():
        torch.testing.assert_close(state[name], want, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize(("chunks", "rows"), [(1, 11), (4, 11), (11, 11)])
def test_gpipe_trains_as_the_plain_model_on_whole_batches(
    everywhere: bool, checkpoint: str, chunks: int, rows: int
) -> None:
    options: dict[str, Any] = {"balance": [3, 3], "chunks": chunks, "checkpoint": checkpoint}
    pipe = penstock.GPipe(network(everywhere), batch_options=EXACT, **options)
    wanted = plain_run(network(everywhere), rows=rows)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        F.mse_loss(pipe(x), y).backward()
        optimizer.step()
    assert_close(pipe, wanted)


def test_where_every_stage_takes_the_batch_whole_the_output_is_the_plain_models_bit_for_bit() -> None:
    pipe, plain = penstock.GPipe(network(), balance=[3, 3], chunks=4, batch_options=EXACT), network()
    x, other = batch(0)[0].requires_grad_(), batch(0)[0].requires_grad_()
    found, wanted = pipe(x), plain(other)
    assert torch.equal(found, wanted)
    found.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)
    assert all(map(torch.equal, *[[p.grad for p in model.parameters()] for model in (pipe, plain)]))
    torch.testing.assert_close(pipe.eval()(x), plain.eval()(other))
    with torch.no_grad():
        assert torch.equal(pipe.train()(x), plain.train()(other))
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_pipeline_trains_as_the_plain_model_on_whole_batches(schedule: str, recompute: str, everywhere: bool) -> None:
    model, wanted = network(everywhere), plain_run(network(everywhere))
    stages = 2 if schedule == "gpipe" else 4
    options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "loss_fn": F.mse_loss}
    with penstock.Pipeline(model, stages=stages, microbatches=4, batch_options=EXACT, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            x, y = batch(step)
            optimizer.zero_grad()
            losses.append(pipe.step(x, target=y))
            before = copy.deepcopy(pipe.state_dict())
            pipe.evaluate(x, target=y)
            assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
            optimizer.step()
    assert_close(model, wanted)
    assert [len(result.losses) for result in losses] == [4, 4]
    x, y = batch(0)
    torch.testing.assert_close(losses[0].loss, F.mse_loss(network(everywhere)(x), y).detach())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_of_one_rank_wait_for_those_that_take_their_batch_whole(ranks: int, recompute: str) -> None:
    model, wanted = network(), plain_run(network())
    options: dict[str, Any] = {"ranks": ranks, "recompute": recompute, "loss_fn": F.mse_loss}
    with penstock.Pipeline(
        model,
        balance=[1, 2, 2, 1],
        microbatches=4,
        schedule="gpipe",
        batch_options=EXACT,
        **options,
    ) as pipe:
        train(pipe)
    assert_close(model, wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "zb-h1"])
def test_schedules_that_would_wait_for_ever_are_refused_with_those_that_can(schedule: str) -> None:
    stages = 4 if schedule in ("interleaved-1f1b", "zb-v") else 2
    with pytest.raises(UsageError, match="gpipe"):
        penstock.Pipeline(
            network(),
            stages=stages,
            microbatches=8,
            schedule=schedule,
            batch_options=EXACT,
        )


def test_one_microbatch_is_whole_under_any_schedule() -> None:
    model, wanted = network(), plain_run(network(), steps=1)
    with penstock.Pipeline(
        model,
        stages=2,
        microbatches=1,
        schedule="1f1b",
        batch_options=EXACT,
        loss_fn=F.mse_loss,
    ) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    assert_close(model, wanted)


def test_without_running_statistics_evaluation_is_whole_too() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 6)).double()
    x = batch(0)[0]
    with penstock.Pipeline(
        model,
        stages=3,
        microbatches=4,
        schedule="gpipe",
        batch_options=EXACT,
        loss_fn=F.mse_loss,
    ) as pipe:
        torch.testing.assert_close(pipe.predict(x), model.eval()(x).detach())
    torch.testing.assert_close(penstock.GPipe(model, balance=3, chunks=4, batch_options=EXACT)(x), model(x))


def test_values_past_the_stage_and_side_inputs_come_through() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
            return {"y": self.layer(x) * mask, "ids": torch.arange(len(x)), "note": "rows", "none": None}

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, given: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
            assert given["note"] == "rows"
            return self.norm(given["y"]) * mask, given["y"].detach()

    class End(nn.Module):
        def forward(self, y: Tensor, kept: Tensor) -> Tensor:
            return y + kept

    torch.manual_seed(0)
    stages = [First().double(), Middle().double(), End()]
    x, y = batch(0)
    mask = (torch.arange(ROWS) % 3 > 0).double().unsqueeze(1)
    with penstock.Pipeline(
        stages,
        microbatches=4,
        schedule="gpipe",
        batch_options=EXACT,
        loss_fn=F.mse_loss,
    ) as pipe:
        pipe.step(x, target=y, mask=mask)
        have = [parameter.grad for parameter in pipe.parameters()]
        pipe.zero_grad()
        F.mse_loss(stages[2](*stages[1](stages[0](x, mask), mask)), y).backward()
        for one, other in zip(have, [parameter.grad for parameter in pipe.parameters()], strict=True):
            torch.testing.assert_close(one, other)


class Ladder(nn.Module):
    """Batch norms on both sides of skips."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("down", "lower", "bottom", "rise", "up"):
            self.add_module(name, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        first = self.down(x)
        second = self.lower(first)
        return self.up(self.rise(self.bottom(second) + second) + first)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_skips_past_stages_that_gather_are_proved_and_exact(checkpoint: str) -> None:
    """What such a stage sends comes in a burst: with receives posted late, one message held up another for ever."""
    pipe = penstock.GPipe(Ladder(), stages=4, chunks=4, batch_options=EXACT, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(pipe(x), y).backward()
        optimizer.step()
    assert_close(pipe, plain_run(Ladder()))


def test_rows_that_are_not_in_front_are_refused() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    model = nn.Sequential(nn.Linear(6, 6), Turned(), Turned(), nn.BatchNorm1d(6)).double()
    pipe = penstock.GPipe(model, balance=[2, 2], chunks=2, batch_options=EXACT)
    with pytest.raises(ModelError, match="dimension 0 is not that of the 5 rows"):
        pipe(batch(0)[0])


def test_conversion_options_and_parity_are_clear() -> None:
    model = penstock.exact_batch_norm(network())
    assert type(model[1]).__name__ == "ExactBatchNorm1d"
    assert type(penstock.defer_batch_norm(model)[1]).__name__ == "DeferredBatchNorm1d"
    copied = pickle.loads(pickle.dumps(penstock.exact_batch_norm(model)))
    assert type(penstock.restore_batch_norm(copied)[1]) is nn.BatchNorm1d
    with pytest.raises(UsageError, match=r"batch_norm='whole'\): choose"):
        penstock.BatchOptions(batch_norm="whole")
    with pytest.raises(UsageError, match="process group of replicas"):
        penstock.BatchOptions(batch_norm="exact", batch_norm_group="all")
    with pytest.raises(UsageError, match="as a whole"):
        penstock.parity(network(), batch(0)[0], pipeline={"batch_options": EXACT})
