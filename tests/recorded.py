"""Small recorded runs, measured for real on threads, with sleeps where a test wants something slow."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.schedule import Timeline

WIDTH = 4


class Nap(nn.Module):
    """A layer that takes its time, on a machine of any load."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


def pipeline(naps: list[float], microbatches: int = 6, schedule: str = "1f1b", **options: Any) -> penstock.Pipeline:
    """Stages that sleep so long in each forward, on threads."""
    stages = [Nap(seconds) for seconds in naps]
    return penstock.Pipeline(
        stages, microbatches=microbatches, schedule=schedule, loss_fn=F.mse_loss, transport="threads", **options
    )


def record(pipe: penstock.Pipeline, steps: int = 2) -> Timeline:
    """The last of some training steps."""
    x = torch.randn(4 * pipe.microbatches, WIDTH)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pipe.record() as timeline:
        for _ in range(steps):
            pipe.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
    return timeline


def delay_link(pipe: penstock.Pipeline, source: int, target: int, seconds: float) -> None:
    """Messages from rank to rank arrive so much later, in order; the sender does not wait."""
    mailbox, due = pipe.deployment.ranks.executors[source].mailbox, SimpleQueue[tuple[float, Any, tuple[Any, ...]]]()

    def carry() -> None:
        while True:
            when, send, message = due.get()
            time.sleep(max(0.0, when - time.perf_counter()))
            send(*message)

    mailbox.open()
    for end in mailbox.ends.outgoing.values():
        if end.channel.target_rank == target:
            at_once = end._put
            end._put = lambda *message, send=at_once: due.put((time.perf_counter() + seconds, send, message))  # type: ignore[method-assign]
    threading.Thread(target=carry, daemon=True).start()
