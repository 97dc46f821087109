"""Training on virtual time: real pipelines, optimizers and checkpoints, with ranks that die at any moment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn

import penstock
from penstock.checkpoint.disk.manifest import damages, newest_first
from penstock.errors import PeerFailure, UsageError
from penstock.schedule import Costs, Schedule, build
from penstock.tools.rehearsal.training import rehearse_training
from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_as

STEPS, EVERY, MICROBATCHES = 6, 2, 4
CLIP = 0.4  # bites in some of the steps
COSTS = Costs(forward=0.3, input=0.21, weight=0.17, hop=0.05)


def model_of(stages: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)).double() for _ in range(stages)]


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs, target = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64).unbind()
    return inputs, target


class Trained(NamedTuple):
    """What one rank has in the end."""

    losses: dict[int, float]  # by step, of the last attempt
    weights: dict[str, Tensor]


class Life:
    """What the ranks of one attempt have lived through, those that died included."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}  # by rank: the step that it went on from
        self.losses: dict[int, dict[int, float]] = {}
        self.complete: set[int] = set()  # steps whose checkpoint some rank knows to be complete
        self.on_disk: list[int] = []  # steps of the checkpoints that there were at its beginning


class Script:
    """A user's training script: it resumes, trains, and saves every few steps."""

    def __init__(self, schedule: Schedule, folder: Path, overlaps: bool, is_async: bool = True) -> None:
        self.schedule, self.folder, self.overlaps, self.is_async = schedule, folder, overlaps, is_async
        self.lives: list[Life] = []
        self._calls = 0

    def __call__(self, rank: int) -> Trained:
        if self._calls % self.schedule.ranks == 0:
            self.lives.append(Life())
            self.lives[-1].on_disk = steps_on_disk(self.folder)
        self._calls += 1
        life = self.lives[-1]
        pipe = penstock.Pipeline(
            model_of(self.schedule.stages), schedule=self.schedule, loss_fn=nn.functional.mse_loss, seed=1, timeout=10
        )
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        with penstock.Checkpointer(self.folder, keep_last=None, async_save=self.is_async) as checkpointer:
            begin = 0 if checkpointer.latest() is None else checkpointer.load(pipe, optimizer).step
            life.begun[rank], life.losses[rank] = begin, {}
            for first in range(begin, STEPS, EVERY):
                for step, loss in self._train(pipe, optimizer, range(first, first + EVERY)):
                    life.losses[rank][step] = loss
                if first > begin:
                    checkpointer.wait()
                    life.complete.add(first)
                checkpointer.save(first + EVERY, pipe, optimizer)
            checkpointer.wait()
            life.complete.add(STEPS)
        weights = {name: value.detach().clone() for name, value in pipe.named_parameters()}
        pipe.close()
        return Trained(life.losses[rank], weights)

    def _train(self, pipe: Any, optimizer: Any, steps: range) -> Iterator[tuple[int, float]]:
        batches = [batch_of(number) for number in steps]
        if self.overlaps:
            results = pipe.train_steps(batches, optimizer, clip=CLIP)
            yield from ((number, result.loss.item()) for number, result in zip(steps, results, strict=True))
            return
        for number, (inputs, target) in zip(steps, batches, strict=True):
            result = pipe.step(inputs, target=target)
            pipe.clip_grad_norm_(CLIP)
            optimizer.step()
            pipe.zero_grad()
            yield number, result.loss.item()


def steps_on_disk(folder: Path) -> list[int]:
    """The steps of the checkpoints that a reader finds; each of them must be whole."""
    if not folder.exists():
        return []
    whole, problems = newest_first(folder)
    assert not problems
    for path, manifest in whole:
        assert not list(damages(path, manifest, sums=True))
    return sorted(manifest.step for _, manifest in whole)


def plain_losses(stages: int) -> list[float]:
    """The losses of a loop without a pipeline."""
    layers = model_of(stages)
    optimizer = torch.optim.Adam([each for layer in layers for each in layer.parameters()], lr=0.01)
    losses = []
    for step in range(STEPS):
        total = 0.0
        inputs, target = batch_of(step)
        pairs = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        for number, (value, wanted) in enumerate(pairs):
            for stage, layer in enumerate(layers):
                with penstock.randomness(1, step, number, stage):
                    value = layer(value)
            loss = nn.functional.mse_loss(value, wanted) / MICROBATCHES
            loss.backward()
            total += loss.item()
        losses.append(total)
        nn.utils.clip_grad_norm_([each for layer in layers for each in layer.parameters()], CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("family", "overlaps"), by_turns(["1f1b", "zb-v"], [False, True], fast=[("zb-v", True)], one_in=1)
)
def test_without_faults_it_trains_as_a_plain_loop_does(family: str, overlaps: bool, tmp_path: Path) -> None:
    script = Script(build(family, 3, MICROBATCHES), tmp_path / "run", overlaps)
    (attempt,) = rehearse_training(script, script.schedule, COSTS, folder=script.folder, file_seconds=0.2)
    assert attempt.is_complete
    assert not attempt.hung
    expected = plain_losses(script.schedule.stages)
    for trained in attempt.results:
        assert [trained.losses[step] for step in range(STEPS)] == pytest.approx(expected, rel=1e-12)
    assert steps_on_disk(script.folder) == [2, 4, 6]


def check_deaths(seed: int, folder: Path) -> None:
    """Ranks die, or stand still, at any moment, twice; what must be true of the run as a whole."""
    draw = random.Random(seed)
    schedule = build(draw.choice(["1f1b", "zb-h1", "zb-v", "gpipe"]), draw.randint(2, 4), MICROBATCHES)
    options = {"seed": seed, "timeout": 10.0, "jitter": draw.choice([0.0, 0.4]), "steps": STEPS}
    overlaps, is_async = draw.random() < 0.5, draw.random() < 0.7
    quiet = Script(schedule, folder / "quiet", overlaps, is_async)
    (reference,) = rehearse_training(quiet, schedule, COSTS, folder=quiet.folder, file_seconds=0.4, **options)
    deaths = [
        [f"{draw.choice(['die', 'stop'])} {draw.randrange(schedule.ranks)} at {draw.uniform(0, reference.seconds)}"]
        for _ in range(2)
    ]
    script = Script(schedule, folder / "run", overlaps, is_async)
    attempts = rehearse_training(
        script, schedule, COSTS, folder=script.folder, file_seconds=0.4, faults=deaths, **options
    )
    assert attempts[-1].is_complete
    assert steps_on_disk(script.folder)[-1] == STEPS
    known: set[int] = set()
    for life, attempt in zip(script.lives, attempts, strict=True):
        assert not attempt.hung
        assert known <= set(life.on_disk)  # what any rank knew to be complete is there after all died
        newest = max(life.on_disk, default=0)
        assert set(life.begun.values()) <= {newest}  # all ranks go on from the last complete one
        for rank, losses in life.losses.items():
            assert list(losses) == list(range(newest, newest + len(losses)))  # none lost, none twice
            for step, loss in losses.items():
                assert loss == reference.results[rank].losses[step]
        known |= life.complete
        dead = {fault.rank for fault in attempt.struck}
        for error in attempt.errors:
            assert error is None or (isinstance(error, PeerFailure) and {error.rank} == dead)
    for trained, quietly in zip(attempts[-1].results, reference.results, strict=True):
        for name, value in quietly.weights.items():
            assert torch.equal(trained.weights[name], value)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_ranks_that_die_at_any_moment_lose_no_more_than_the_steps_since_the_checkpoint(
    seed: int, tmp_path: Path
) -> None:
    check_deaths(seed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(6, 306, 50))
def test_many_such_runs(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        check_deaths(seed, tmp_path / str(seed))


MINE = """
import torch
from torch import nn


def model():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers).to(torch.float64), nn.functional.mse_loss


class Rows:
    def batch(self, number):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        y = torch.sin(3 * x) * (30 if number == 6 else 1)
        return x, y * (float("inf") if number == 9 else 1)

    def validation(self, number):
        return self.batch(1000 + number)
"""
COMMAND = [
    "model.source=rehearsed_source:model",
    "data.source=rehearsed_source:Rows",
    "data.batch=8",
    "pipeline.ranks=3",
    "pipeline.microbatches=4",
    "pipeline.schedule=zb-v",
    "pipeline.timeout=10",
    "training.steps=14",
    "training.nonfinite=skip",
    "optimizer.clip=1.0",
    "evaluation.every=5",
    "checkpoint.every=4",
    "logging.every=10",
    "logging.tensorboard=off",
]


class Command:
    """`penstock train` on every rank, from the loaded configuration on."""

    def __init__(self, output: Path, overlaps: bool) -> None:
        self.config = load_config(
            None, [*COMMAND, f"pipeline.overlap_steps={str(overlaps).lower()}", f"output={output}"]
        )
        self.folder = RunFolder(output)
        self.folder.prepare(self.config, resume=False, fresh=False).free()

    def __call__(self, rank: int) -> int:
        return train_as(Job(self.config, ""), self.config, Stop(), 0.0, processes=True, first=rank == 0)

    def lines(self) -> list[tuple[str, ...]]:
        names = ("step", "loss", "lr", "norm", "validation", "skipped")
        return [tuple(repr(line.get(name)) for name in names) for line in read_metrics(self.folder.metrics)]


@pytest.mark.slow
def test_the_training_command_goes_on_after_deaths_as_if_there_had_been_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loop: evaluations, saves in the background, clipping that bites, a step that is left out; steps that
    overlap and steps that do not. Ranks die in a step, in an evaluation, or while a checkpoint is written.
    """
    (tmp_path / "rehearsed_source.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    schedule, options = build("zb-v", 3, 4), {"steps": 20, "timeout": 10.0, "file_seconds": 0.5}
    quiet = Command(tmp_path / "quiet", overlaps=False)
    (reference,) = rehearse_training(quiet, schedule, COSTS, folder=quiet.folder.root, **options)  # type: ignore[arg-type]
    assert reference.results == (0, 0, 0)
    expected = quiet.lines()
    assert [line[0] for line in expected if line[-1] == "True"] == ["10"]
    draw = random.Random(0)
    for overlaps in (False, True):
        run = Command(tmp_path / f"run-{overlaps}", overlaps)
        deaths = [[f"die {draw.randrange(3)} at {draw.uniform(0.2, 0.9) * reference.seconds}"] for _ in range(3)]
        attempts = rehearse_training(run, schedule, COSTS, faults=deaths, folder=run.folder.root, **options)  # type: ignore[arg-type]
        assert attempts[-1].results == (0, 0, 0)
        assert any(attempt.struck for attempt in attempts)
        assert run.lines() == expected


def test_one_pipeline_per_rank(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, MICROBATCHES)

    def twice(rank: int) -> None:
        for _ in range(2):
            penstock.Pipeline(model_of(2), schedule=schedule, loss_fn=nn.functional.mse_loss)

    (attempt,) = rehearse_training(twice, schedule)
    assert all(isinstance(error, UsageError) for error in attempt.errors)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"faults": ["die 1 at 15"]}, "one list per attempt"),
        ({"faults": "die 1 at 15"}, "one list per attempt"),
        ({"file_seconds": -1}, "file_seconds is a number"),
        ({"file_seconds": float("nan")}, "file_seconds is a number"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        penstock.rehearse_training(lambda rank: None, build("1f1b", 2, 2), **options)
