"""What a rank does is logged at DEBUG, and only then."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import penstock


def test_each_rank_says_what_it_runs_and_then_every_action(caplog: pytest.LogCaptureFixture) -> None:
    stages = [nn.Linear(3, 3) for _ in range(2)]
    x = torch.ones(4, 3)
    with penstock.Pipeline(stages, microbatches=2, schedule="1f1b", loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
        assert not caplog.records
        with caplog.at_level(logging.DEBUG, logger="penstock"):
            pipe.step(x, target=x)
        lines = [record.getMessage() for record in caplog.records]
        for rank in range(2):
            said = [line for line in lines if line.startswith(f"rank {rank} runs 1f1b: 2 ranks, 2 stages")]
            assert len(said) == 1
            actions = [line.rpartition(" ")[2] for line in lines if line.startswith(f"rank {rank}: action ")]
            computes = [str(action) for action in pipe.schedule.rank(rank) if action is not None]
            assert [action for action in actions if "_" not in action] == computes
            assert any("SEND_" in action for action in actions)
        caplog.clear()
        pipe.step(x, target=x)
        assert not caplog.records
