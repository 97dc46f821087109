"""The command on checkpoints of a short run, for tests of what it shows."""

from __future__ import annotations

from pathlib import Path

import torch
from train_runs import LAYOUTS, Run
from typer.testing import CliRunner

import penstock
from penstock.cli import app


def penstock_command(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def saved_run(folder: Path) -> dict[str, torch.Tensor]:
    """Two checkpoints of one run in a folder, and `elsewhere`, the second one as another layout saved it."""
    run = Run(**LAYOUTS["three stages"])
    with penstock.Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            run.step()
            checkpointer.save(step, run.pipe, run.optimizer, config={"lr": 0.1 * step})
    run.close()
    other = Run(seed=4, **LAYOUTS["one stage"])
    penstock.load(folder / "step-00000002", other.pipe, other.optimizer)
    penstock.save(folder / "elsewhere", other.pipe, other.optimizer, step=2, config={"lr": 0.2})
    other.close()
    return {name: value.clone() for name, value in other.pipe.state_dict().items()}
