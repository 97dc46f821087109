"""What a run that goes on is given: its configuration as it is now, its data where they were, a request to stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiers import mostly_slow

from penstock.errors import ModelError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.launch.stopping import Stop, asking
from penstock.tools.train.loop import Trainer
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here

TINY = [
    "data.sequence=16",
    "data.batch=8",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.workers=threads",
    "training.steps=2",
    "optimizer.decay=constant",
    "evaluation.every=0",
    "logging.tensorboard=off",
]

SHUFFLED = """
import random
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = torch.arange(96.0).reshape(24, 4).sin()


def model():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), nn.functional.mse_loss


def loader(seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(ROWS, ROWS * 2), batch_size=8, shuffle=True, generator=generator)


class Own:
    def __iter__(self):
        order = random.sample(range(24), 24)
        for first in range(0, 24, 8):
            rows = ROWS[order[first : first + 8]]
            yield rows, rows * 2
"""


def made(output: Path, *changes: str) -> TrainConfig:
    return load_config(None, [*TINY, f"output={output}", *changes])


def trained(config: TrainConfig, resume: bool = False) -> int:
    RunFolder(Path(config.output)).prepare(config, resume=resume, fresh=not resume).free()
    return train_here(Job(config, "penstock train --resume"), Stop())


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(RunFolder(output).metrics)]


@pytest.mark.parametrize(
    "source",
    mostly_slow([["shuffled:loader"], ["shuffled:loader", "data.options.seed=3"], ["shuffled:Own"]], ["shuffled:Own"]),
)
def test_shuffled_data_go_on_in_the_middle_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: list[str]
) -> None:
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shuffled", raising=False)
    common = ["model.source=shuffled:model", f"data.source={source[0]}", *source[1:]]
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    assert trained(made(straight, *common, "training.steps=8")) == 0
    for steps in (2, 4, 8):  # in the first round of 3, in the second, to the end
        assert trained(made(parted, *common, f"training.steps={steps}"), resume=steps > 2) == 0
    assert losses(parted) == losses(straight)


def test_ranks_that_were_given_other_batches_are_named() -> None:
    rows = torch.randn(8, 300)
    batch, same, other = (
        DataBatch((each,), {"mask": rows > 0}, rows[:, 1:].bfloat16(), 8) for each in (rows, rows.clone(), rows.flip(0))
    )
    assert batch.mark() == same.mark() != other.mark()
    assert batch.mark(1) != batch.mark(2)
    trainer = Trainer.__new__(Trainer)
    trainer.step, trainer.steps = 5, SimpleNamespace(mark=batch.mark())  # type: ignore[assignment]
    trainer.processes = SimpleNamespace(exchange=lambda mine: [mine, (False, 1, other.mark())])  # type: ignore[assignment]
    trainer.state = SimpleNamespace(data=SimpleNamespace(words="mine:data"))  # type: ignore[assignment]
    with pytest.raises(ModelError, match="mine:data: in step 5, rank 1 was given another batch than rank 0"):
        trainer._agree(False)
    trainer.steps.mark = other.mark()
    assert trainer._agree(True)[0]


def test_sigterm_and_a_closed_terminal_ask_to_stop_as_ctrl_c_does() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    assert set(asking()) == set(before)
    for number in asking():
        with Stop(*asking()) as stop:
            assert not stop.asked
            os.kill(os.getpid(), number)
            assert stop.asked
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert asking() == (signal.SIGTERM,)
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def test_signals_of_one_request_are_not_two_and_a_fork_can_be_ended() -> None:
    """`timeout` sends its signal twice; a pool of a data set ends its workers by SIGTERM, which they had noted down."""
    with Stop(*asking()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        child = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
        child.start()
        assert begun.wait(60)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
