"""A rank that raises, dies, stalls or runs out of memory while devices run behind their hosts."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import attempt, on_device
from tiers import by_turns

from penstock.errors import PeerFailure

TIMEOUT, LONG = 4.0, 60.0  # of a step in which a rank stalls, and of any other
SOON = 20.0  # seconds for all else, on a machine with much to do: a dead rank is named long before the timeout
STEPS = 3  # of which the second one fails
SCHEDULES = {"F": "1f1b", "B": "1f1b", "I": "zb-h1", "W": "zb-h1"}  # by operation: a schedule that has it
RECOVERS = ("raises", "memory")  # after these, the pipeline goes on


def fail(how: str) -> None:
    import os
    import signal
    import time

    import torch
    from accelerator import pretend

    if how == "raises":
        raise ValueError("on purpose")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stalls":
        time.sleep(3 * TIMEOUT)
        return
    here = torch.accelerator.current_device_index()
    alone = torch.distributed.is_initialized()  # else the other rank has the same limit
    pretend.native.limit_memory(torch.accelerator.memory_allocated(here) + 64 if alone else 1 << 20)
    torch.empty(1 << 20, device=pretend.device(here))


def faulted(op: str, how: str, who: int, ranks: int = 2) -> dict[str, Any]:
    """Train, while rank `who` fails in the last of its operations `op` in the second step."""
    import copy
    import time

    import torch
    from accelerator import pretend
    from torch import nn

    import penstock
    from penstock.schedule import Op

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    alone, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    for one, other in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.functional.mse_loss(alone(one), other) / 4).backward()
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    pretend.defer(lag=0.001)
    timeout = TIMEOUT if how == "stalls" else LONG
    pipe = penstock.Pipeline(
        model,
        stages=ranks,
        microbatches=4,
        schedule=SCHEDULES[op],
        loss_fn=nn.MSELoss(),
        timeout=timeout,
    )
    number = 0

    def handler(action: Any, context: Any) -> None:
        if number == 1 and action.stage == who and action.microbatch == 3:
            fail(how)
        context.run(action)

    pipe.register(Op[op], handler)
    found: dict[str, Any] = {"errors": [], "seconds": []}
    for number in range(STEPS if how in RECOVERS else 2):  # noqa: B007 the handler reads it
        pipe.zero_grad()
        start, error = time.monotonic(), ""
        try:
            pipe.step(x, target=y)
        except PeerFailure as failure:
            error = str(failure).partition("\n")[0]
        pretend.native.limit_memory(0)
        found["errors"].append(error)
        found["seconds"].append(time.monotonic() - start)
    if how in RECOVERS:
        grads = {name: each.grad for name, each in pipe.named_parameters() if each.grad is not None}
        assert grads
        found["exact"] = all(torch.allclose(each.cpu(), wanted[name], atol=1e-6) for name, each in grads.items())
    start = time.monotonic()
    pipe.close()
    found["closing"] = time.monotonic() - start
    return found


WORDS = {"raises": "ValueError: on purpose", "memory": "OutOfMemoryError", "dies": "", "stalls": "silent for 4 s"}


def check(found: dict[str, Any], op: str, how: str, who: int) -> None:
    """The survivors know in time who has failed and where, and a rank that can go on computes what is right."""
    assert found["errors"][0] == ""
    assert f"rank {who} failed" in found["errors"][1], found["errors"]
    assert WORDS[how] in found["errors"][1]
    if how in RECOVERS:
        assert f"action {who}{op}3" in found["errors"][1]
        assert found["errors"][2] == ""
        assert found["exact"]
    assert found["seconds"][1] < SOON
    assert found["closing"] < SOON


FAST = [("F", "memory", 1), ("B", "dies", 0), ("W", "raises", 0)]


@pytest.mark.parametrize(("op", "how", "who"), by_turns(SCHEDULES, WORDS, (0, 1), fast=FAST, one_in=3))
def test_on_processes(op: str, how: str, who: int) -> None:
    check_processes(2, op, how, who)


@pytest.mark.parametrize(
    ("op", "how", "who"), by_turns([("F", "dies"), ("B", "stalls"), ("I", "raises"), ("W", "memory")], (0, 2, 3))
)
def test_on_four_processes(op: str, how: str, who: int) -> None:
    """Most ranks wait for one that waits itself."""
    check_processes(4, op, how, who)


def check_processes(ranks: int, op: str, how: str, who: int) -> None:
    outcomes = attempt(ranks, faulted, op, how, who, ranks, grouped=True, limit=90)
    assert [each.races for each in outcomes] == [[]] * ranks
    assert [each.deadlocks for each in outcomes] == [[]] * ranks
    for rank, each in enumerate(outcomes):
        if how == "dies" and rank == who:
            assert each.code == -9
        else:
            assert not each.error, each.error + each.stderr[-2000:]
            check(each.value, op, how, who)


ON_THREADS = [how for how in WORDS if how != "dies"]


@pytest.mark.parametrize(
    ("op", "how", "who"), by_turns(SCHEDULES, ON_THREADS, (0, 1), fast=[("I", "raises", 1)], one_in=3)
)
def test_on_threads(op: str, how: str, who: int) -> None:
    outcome = on_device(faulted, op, how, who, limit=90)
    assert outcome.races == []
    check(outcome.value, op, how, who)
