"""Random numbers are a function of (seed, step, microbatch, stage): not of the schedule, the threads or the caller."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.state.randomness import FEW, GeneratorLock, StepCounter, seed_of
from penstock.schedule.builders import TRAINING


class Noise(nn.Module):
    """Adds its random numbers to what passes, so that the output shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight + (torch.rand_like(x) if self.training else 0.0)


def masks(schedule: str, steps: int = 2, microbatches: int = 3, seed: int = 5) -> list[Tensor]:
    pipe = penstock.Pipeline(
        [Noise() for _ in range(4)], microbatches=microbatches, schedule=schedule, loss_fn=F.mse_loss, seed=seed
    )
    x = torch.zeros(6, 3)
    with pipe:
        return [pipe.step(x, target=x, outputs=True).output for _ in range(steps)]


def test_the_seeds_of_neighbouring_computes_have_nothing_in_common() -> None:
    seeds = {seed_of(*numbers) for numbers in product(range(3), range(8), range(16), range(8))}
    assert len(seeds) == 3 * 8 * 16 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("schedule", TRAINING)
def test_masks_are_the_same_under_every_schedule_and_in_a_plain_loop(schedule: str) -> None:
    plain = []
    for step in range(2):
        rows = []
        for microbatch in range(3):
            total = torch.zeros(2, 3)
            for stage in range(4):
                with penstock.randomness(5, step, microbatch, stage):
                    total = total + torch.rand(2, 3)
            rows.append(total)
        plain.append(torch.cat(rows))
    assert all(torch.equal(found, wanted) for found, wanted in zip(masks(schedule), plain, strict=True))


def test_the_seeds_of_a_step_are_those_of_its_computes_however_many_there_are() -> None:
    counter = StepCounter(-12345)
    counter.step, counter.first = 77, 3
    for microbatches in (1, FEW - 1, FEW, 100):
        expected = [seed_of(-12345, 77, number + 3, 5) for number in range(microbatches)]
        assert counter.seeds_for(microbatches, 5) == expected
    assert seed_of(1, 2, 3, 4) == 4111618935282699903


def test_steps_microbatches_stages_and_seeds_have_masks_of_their_own() -> None:
    first, second = masks("1f1b")
    (other,) = masks("1f1b", steps=1, seed=6)
    rows = torch.stack([*first.split(2), *second.split(2), *other.split(2)])
    assert torch.unique(rows, dim=0).shape[0] == 9


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_callers_random_numbers_are_untouched_by_everything_a_pipeline_does(drop: float) -> None:
    def draws(use: bool) -> list[float]:
        torch.manual_seed(1)
        stages = [nn.Sequential(nn.Linear(3, 3), nn.Dropout(drop)) for _ in range(2)]
        found = [torch.rand(()).item()]
        pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss) if use else None
        found.append(torch.rand(()).item())
        for _ in range(2):
            if pipe is not None:
                x = torch.zeros(4, 3)
                pipe.step(x, target=x)
                pipe.evaluate(x, target=x)
                pipe.predict(x)
            found.append(torch.rand(()).item())
        return found

    assert draws(use=True) == draws(use=False)


def test_evaluations_in_between_do_not_change_the_masks_of_training() -> None:
    pipe = penstock.Pipeline([Noise(), Noise()], microbatches=2, loss_fn=F.mse_loss, seed=5)
    again = penstock.Pipeline([Noise(), Noise()], microbatches=2, loss_fn=F.mse_loss, seed=5)
    x = torch.zeros(4, 3)
    for _ in range(3):
        wanted = pipe.step(x, target=x, outputs=True).output
        again.evaluate(x, target=x)
        again.predict(x[:1])
        assert torch.equal(again.step(x, target=x, outputs=True).output, wanted)


def test_the_seed_is_that_of_torch_unless_it_is_given() -> None:
    def masks() -> Tensor:
        torch.manual_seed(9)
        pipe = penstock.Pipeline([Noise(), Noise()], microbatches=2, loss_fn=F.mse_loss)
        torch.rand(5)  # what else the program draws does not matter
        found: Tensor = pipe.step(torch.zeros(4, 3), target=torch.zeros(4, 3), outputs=True).output
        return found

    assert torch.equal(masks(), masks())


class Checkpointed(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(drop), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("drop", mostly_slow([0.0, 0.3], 0.3))
@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb-h1", "zb-v"], "zb-h1"))
def test_a_checkpoint_inside_a_stage_draws_the_same_masks_again(schedule: str, drop: float) -> None:
    """Its backward takes the generator of the whole process, while other ranks compute on their threads."""
    torch.manual_seed(0)
    stages = [Checkpointed(drop) for _ in range(4)]
    x = torch.randn(24, 8)
    pipe = penstock.Pipeline(stages, microbatches=12, schedule=schedule, loss_fn=F.mse_loss, seed=5)
    for step in range(3):
        pipe.zero_grad()
        pipe.step(x, target=x)
        found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        pipe.zero_grad()
        for microbatch, rows in enumerate(x.split(2)):
            value = rows
            for number, stage in enumerate(stages):
                with penstock.randomness(5, step, microbatch, number):
                    value = stage(value)
            (F.mse_loss(value, rows) / 12).backward()
        wanted = [parameter.grad for parameter in pipe.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if b is not None)


def test_a_stage_that_begins_to_draw_is_refused_once_and_exact_from_then_on() -> None:
    draws = [False]  # of no module: what is set on those is seen before the step

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight + (torch.rand_like(x) if draws[0] else 0.0)

    stages = [Late(), Late()]
    pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss, seed=5)
    x = torch.zeros(4, 3)
    pipe.step(x, target=x)
    draws[0] = True
    with pytest.raises(PeerFailure, match=r"draws random numbers, but did not when it first ran.*Run the step again"):
        pipe.step(x, target=x)
    output = pipe.step(x, target=x, outputs=True).output
    rows = []
    for microbatch in range(2):
        total = torch.zeros(2, 3)
        for stage in range(2):
            with penstock.randomness(5, 1, microbatch, stage):
                total = total + torch.rand(2, 3)
        rows.append(total)
    assert torch.equal(output, torch.cat(rows))


def test_pipelines_on_two_threads_of_the_caller_do_not_disturb_each_other() -> None:
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        found[number] = masks("1f1b", steps=4, seed=number)

    before = torch.get_rng_state()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(before, torch.get_rng_state())
    for number in range(2):
        wanted = masks("1f1b", steps=4, seed=number)
        assert all(torch.equal(a, b) for a, b in zip(found[number], wanted, strict=True))


def test_the_room_is_for_one_that_draws_or_for_many_that_do_not() -> None:
    lock, inside, most = GeneratorLock(), [0, 0], [0, 0]
    clash = []

    def nobody(_: object) -> None:
        return None

    def compute(draws: bool) -> None:
        for _ in range(200):
            with lock.alone(nobody) if draws else lock.beside(nobody):
                inside[draws] += 1
                most[draws] = max(most[draws], inside[draws])
                if inside[True] > 1 or (inside[True] and inside[False]):
                    clash.append(tuple(inside))
                inside[draws] -= 1

    threads = [threading.Thread(target=compute, args=(number % 2 == 0,)) for number in range(6)]
    with lock.kept():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert clash == []
    assert most[True] == 1
