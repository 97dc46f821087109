"""Evaluation and prediction: any batch, at any time, and training does not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import Microbatches
from penstock.errors import RunError
from penstock.runtime.state import tensor_snapshots
from penstock.schedule.builders import TRAINING


class Layer(nn.Module):
    """Dropout, buffers and weights: all that an evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.linear(x)))
        return out


def pipeline(schedule: str = "1f1b", **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    return penstock.Pipeline(
        [Layer() for _ in range(4)], microbatches=3, schedule=schedule, loss_fn=F.mse_loss, seed=1, **options
    )


def plain(pipe: penstock.Pipeline, x: Tensor) -> Tensor:
    """What the model says in eval mode, without the pipeline."""
    model = nn.Sequential(*pipe.deployment.ranks.modules().values())
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        output: Tensor = model.eval()(x)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return output


def state(pipe: penstock.Pipeline) -> list[Any]:
    gradients = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    kept = [*(p.detach().clone() for p in pipe.parameters()), *(b.clone() for _, b in pipe.named_buffers())]
    modes = [module.training for part in pipe.deployment.ranks.modules().values() for module in part.modules()]
    return [gradients, kept, torch.get_rng_state(), modes]


@pytest.mark.parametrize("schedule", by_turns(TRAINING, fast=["looped-bfs", "zb-v"]))
def test_before_between_and_after_training_at_any_batch_size(schedule: str) -> None:
    pipe, undisturbed = pipeline(schedule), pipeline(schedule)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for _ in range(2):
        for rows in (1, 2, 3, 5, 6, 14):
            a, b = torch.randn(rows, 4), torch.randn(rows, 4)
            before = state(pipe)
            result = pipe.evaluate(a, target=b)
            torch.testing.assert_close(result.loss, F.mse_loss(plain(pipe, a), b))
            assert len(result.losses) == min(rows, 3)
            torch.testing.assert_close(pipe.predict(a), plain(pipe, a))
            torch.testing.assert_close(state(pipe)[2:], before[2:], rtol=0, atol=0)
            torch.testing.assert_close(state(pipe)[1], before[1], rtol=0, atol=0)
            torch.testing.assert_close(state(pipe)[0], before[0], rtol=0, atol=0)
        assert torch.equal(pipe.step(x, target=y).loss, undisturbed.step(x, target=y).loss)
        torch.testing.assert_close(state(pipe)[:2], state(undisturbed)[:2], rtol=0, atol=0)


def test_modules_that_the_user_put_into_eval_mode_are_still_in_it() -> None:
    pipe = pipeline()
    norms = [
        module
        for part in pipe.deployment.ranks.modules().values()
        for module in part.modules()
        if "Norm" in str(type(module))
    ]
    for norm in norms:
        norm.eval()
    pipe.predict(torch.randn(4, 4))
    assert [norm.training for norm in norms] == [False] * len(norms)
    assert all(part.training for part in pipe.deployment.ranks.modules().values())


def test_modes_come_back_even_if_the_evaluation_fails() -> None:
    pipe = pipeline()
    with pytest.raises(penstock.errors.PeerFailure, match="mat1 and mat2"):
        pipe.predict(torch.randn(4, 5))
    assert all(module.training for part in pipe.deployment.ranks.modules().values() for module in part.modules())
    x = torch.randn(6, 4)
    assert torch.equal(pipe.step(x, target=x).loss, pipeline().step(x, target=x).loss)


def test_without_a_target_there_is_an_output_and_no_loss() -> None:
    pipe = pipeline()
    result = pipe.evaluate(torch.randn(5, 4))
    assert (result.loss, result.losses, result.output) == (None, (), None)
    assert pipe.evaluate(torch.randn(5, 4), outputs=True).output.shape == (5, 4)


def test_outputs_have_no_graph() -> None:
    assert not pipeline().predict(torch.randn(5, 4)).requires_grad


def test_a_ready_split_may_have_any_number_of_microbatches() -> None:
    pipe = pipeline()
    xs = [torch.randn(rows, 4) for rows in (1, 4, 2, 2, 3)]
    torch.testing.assert_close(pipe.predict(Microbatches(xs)), plain(pipe, torch.cat(xs)))


def test_an_evaluation_weighs_microbatches_as_training_does() -> None:
    pipe = penstock.Pipeline(
        [nn.Linear(4, 5), nn.Identity()],
        microbatches=3,
        loss_fn=F.cross_entropy,
        loss_options=penstock.LossOptions(weight=lambda target: (target != -100).sum()),
    )
    x, y = torch.randn(7, 4), torch.tensor([1, 2, -100, 0, -100, -100, 3])
    torch.testing.assert_close(pipe.evaluate(x, target=y).loss, F.cross_entropy(plain(pipe, x), y))
    assert pipe.predict(x).shape == (7, 5)  # no target, so nothing to weigh


def test_in_the_middle_of_accumulation_no_gradient_is_lost_or_scaled() -> None:
    pipe, other = pipeline(), pipeline()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for middle in (pipe, other):
        middle.step(x, target=y)
        if middle is pipe:
            middle.evaluate(x, target=y)
        middle.step(x, target=y)
    torch.testing.assert_close(state(pipe)[0], state(other)[0], rtol=0, atol=0)


def test_a_shorter_or_longer_sequence_than_in_training_gives_its_own_output() -> None:
    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4) for _ in range(4)], microbatches=2, schedule="zb-v", loss_fn=F.mse_loss)
    x = torch.randn(4, 6, 4)
    pipe.step(x, target=x)
    for length in (2, 6, 11):
        a = torch.randn(4, length, 4)
        torch.testing.assert_close(pipe.predict(a), plain(pipe, a))


class Writes(nn.Module):
    """Writes in any mode: in place, by a new tensor, past versions, and to a table that may be too large to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("norm_mean", torch.zeros(4))
        self.register_buffer("norm_var", torch.ones(4))
        self.register_buffer("table", torch.zeros(20_000))
        self.register_buffer("late", None)
        self.layer, self.writes_table = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.late = None if self.training else x.detach().sum()
        if self.writes_table:
            self.table += 1
        return F.batch_norm(self.layer(x), self.norm_mean, self.norm_var, training=True)


def test_layers_that_write_in_eval_mode_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_snapshots, "LARGE_BYTES", 64 * 1024)
    first = Writes()
    pipe = penstock.Pipeline([first, Writes()], microbatches=3, loss_fn=F.mse_loss)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for _ in range(2):
        pipe.step(x, target=y)
        before, own = state(pipe), first.calls
        pipe.evaluate(x, target=y)
        pipe.predict(x)
        torch.testing.assert_close(state(pipe), before, rtol=0, atol=0)
        assert first.calls is own
        assert first.late is None
    assert first.calls == 6
    first.writes_table = True
    with pytest.raises(RunError, match="wrote to table of Writes, which earlier ones did not"):
        pipe.evaluate(x, target=y)
    before = state(pipe)
    pipe.evaluate(x, target=y)  # known by now
    torch.testing.assert_close(state(pipe), before, rtol=0, atol=0)
