"""The moving average of the weights: exact in every layout, swapped in and out to the bit, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.export import export
from penstock.errors import CheckpointError, UsageError
from penstock.pipeline import Pipeline
from penstock.tools.train.updates.ema import WeightAverage

DECAY = 0.6


def made(frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]).to(torch.float64)
    model[0][0].bias.requires_grad_(not frozen)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def plain(steps: int) -> dict[str, torch.Tensor]:
    """The average of a loop in one process, written down by its formula."""
    model = made()
    averages = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.05)
    for step in range(steps):
        nn.functional.mse_loss(model(batch(step)), batch(step).cos()).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = min(DECAY, (1 + step) / (10 + step))
        for name, value in model.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * value.detach()
    return averages


class Training:
    """A pipeline with its optimizer and average."""

    def __init__(self, stages: int) -> None:
        self.pipe = Pipeline(made(), stages=stages, microbatches=4, schedule="1f1b", loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.05)
        self.average = WeightAverage(self.pipe, DECAY)

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.pipe.step(batch(number), target=batch(number).cos())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update()

    def save(self, folder: Path, step: int, score: float | None = None, **options: object) -> None:
        with Checkpointer(folder, async_save=False, **options) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save(step, self.pipe, self.optimizer, averages=self.average.tensors, score=score)

    def load(self, folder: Path) -> frozenset[str]:
        loaded = Checkpointer(folder).load(self.pipe, self.optimizer, averages=self.average.tensors)
        self.average.begin(loaded.averages)
        self.average.updates = loaded.step
        return loaded.averages


@pytest.mark.parametrize("stages", [1, 3])
def test_the_average_is_that_of_a_plain_loop_and_goes_in_and_out(stages: int) -> None:
    training = Training(stages)
    training.steps(0, 1, 2, 3)
    wanted = plain(4)
    assert set(training.average.tensors) == set(wanted) - {"0.0.bias"}  # frozen: not averaged
    for name, value in training.average.tensors.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-14)
    before = training.pipe.full_state_dict()
    inside = {}

    def fails() -> None:
        with training.average.in_place():
            inside.update(training.pipe.full_state_dict())
            raise KeyError

    with pytest.raises(KeyError):
        fails()  # the weights come back in this case too
    after = training.pipe.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(inside[name], value) for name, value in training.average.tensors.items())
    assert torch.equal(inside["0.0.bias"], before["0.0.bias"])
    training.pipe.close()


def test_a_checkpoint_gives_it_back_in_another_layout_and_exports_it(tmp_path: Path) -> None:
    first, straight, other = Training(2), Training(2), Training(1)
    straight.steps(0, 1, 2, 3)
    first.steps(0, 1)
    first.save(tmp_path / "run", 2)
    assert other.load(tmp_path / "run") == frozenset(first.average.tensors)
    other.steps(2, 3)
    for name, value in straight.average.tensors.items():
        torch.testing.assert_close(other.average.tensors[name], value, rtol=1e-12, atol=1e-14)
    export(tmp_path / "run" / "step-00000002", tmp_path / "averaged.safetensors", averages=True)
    exported = load_file(tmp_path / "averaged.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in first.average.tensors.items())
    assert torch.equal(exported["0.0.bias"], first.pipe.full_state_dict()["0.0.bias"])
    for training in (first, straight, other):
        training.pipe.close()


def test_a_checkpoint_without_averages_lets_them_begin_at_its_weights(tmp_path: Path) -> None:
    training, other = Training(1), Training(1)
    training.steps(0, 1)
    with Checkpointer(tmp_path, async_save=False) as checkpointer:
        checkpointer.save(2, training.pipe, training.optimizer)
    assert other.load(tmp_path) == frozenset()
    weights = dict(training.pipe.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in other.average.tensors.items())
    with pytest.raises(UsageError, match=r"has no averages of weights; train with training.ema"):
        export(tmp_path / "step-00000002", tmp_path / "x.safetensors", averages=True)
    halves = {name: value.half() for name, value in training.average.tensors.items()}
    training.save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"does not fit the averages:\n.*is float64 .* and float16"):
        Checkpointer(tmp_path).load(other.pipe, averages=halves)
    for each in (training, other):
        each.pipe.close()


def test_low_precision_is_averaged_in_32_bits() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    with Pipeline(model, stages=1, microbatches=1) as pipe:
        average = WeightAverage(pipe, 0.999)
        assert {value.dtype for value in average.tensors.values()} == {torch.float32}
        average.updates = 10**6
        before = average.tensors["0.weight"].clone()
        with torch.no_grad():
            model[0].weight += 0.01
        average.update()
        assert not torch.equal(before, average.tensors["0.weight"])
