"""Ctrl-C while devices run behind their hosts: the step ends, every rank hears of it, and the next step is exact."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import on_device, on_ranks
from tiers import mostly_slow

SOON = 20.0  # seconds, on a machine with much to do; the timeout of the pipeline is far beyond


def interrupted(where: str, goes_on: bool) -> dict[str, Any]:
    """Press Ctrl-C in the second step, on rank 0; its host waits for its device then, or computes."""
    import copy
    import os
    import signal
    import threading
    import time

    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock
    from penstock.errors import PeerFailure

    # Python handles signals in the function that hears of waits, and drops what it raises there: not in a builtin.
    pretend.native.observe({}.setdefault)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    presses = False

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pretend.let_go()

    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            nonlocal presses
            if presses and (not dist.is_initialized() or dist.get_rank() == 0):
                presses = False
                if where == "computes":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    pretend.hang(x.device.index)
                    threading.Timer(0.2, press).start()
                    x.sum().item()  # which ends after Ctrl-C was pressed
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(Layer(8, 8), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    alone = copy.deepcopy(model)
    nn.functional.mse_loss(alone(x), y).backward()
    wanted = dict(alone.named_parameters())
    pretend.defer(lag=0.001)
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, schedule="1f1b", loss_fn=nn.MSELoss(), timeout=60)
    pipe.step(x, target=y)
    found: dict[str, Any] = {}
    begun, presses = time.monotonic(), True
    try:
        pipe.step(x, target=y)
    except (KeyboardInterrupt, PeerFailure) as error:
        found["error"] = type(error).__name__, str(error).partition("\n")[0]
    presses = False
    if goes_on:
        pipe.zero_grad()
        pipe.step(x, target=y)
        grads = {name: each.grad.cpu() for name, each in pipe.named_parameters() if each.grad is not None}
        found["far"] = max(float((each - wanted[name].grad).abs().max()) for name, each in grads.items())  # type: ignore[operator]
    pipe.close()
    found["seconds"] = time.monotonic() - begun
    return found


WAYS = [(where, goes_on) for where in ("waits", "computes") for goes_on in (True, False)]


@pytest.mark.parametrize(("where", "goes_on"), mostly_slow(WAYS, ("waits", True)))
def test_on_processes(where: str, goes_on: bool) -> None:
    pressed, other = on_ranks(2, interrupted, where, goes_on)
    assert pressed.value["error"][0] == "KeyboardInterrupt"
    assert other.value["error"][0] == "PeerFailure"
    assert "rank 0 failed" in other.value["error"][1]
    assert "KeyboardInterrupt" in other.value["error"][1]
    check([pressed, other], goes_on)


@pytest.mark.parametrize(("where", "goes_on"), mostly_slow(WAYS, ("computes", True)))
def test_on_threads(where: str, goes_on: bool) -> None:
    outcome = on_device(interrupted, where, goes_on)
    assert outcome.value["error"][0] == "KeyboardInterrupt"
    check([outcome], goes_on)


def check(outcomes: list[Any], goes_on: bool) -> None:
    for outcome in outcomes:
        assert outcome.value["seconds"] < SOON
        assert not goes_on or outcome.value["far"] < 1e-6
        assert outcome.counts["races"] == 0
