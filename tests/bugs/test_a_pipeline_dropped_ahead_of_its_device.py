"""A pipeline that is dropped while its device is behind its host leaves nobody waiting."""

from __future__ import annotations

import pytest
from accelerator.harness import on_ranks
from tiers import mostly_slow


def leave_a_loop_and_go_on(family: str, behind: int) -> tuple[list[float], float]:
    """Break out of a loop, drop the pipeline and use another one; the device of rank `behind` is late."""
    import copy
    import gc

    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(9, 8), torch.randn(9, 8)
    alone = copy.deepcopy(model)
    nn.functional.mse_loss(alone(x), y).backward()
    wanted = dict(alone.named_parameters())

    def made() -> penstock.Pipeline:
        own = copy.deepcopy(model)
        return penstock.Pipeline(own, stages=2, microbatches=5, schedule=family, loss_fn=nn.MSELoss(), timeout=10)

    pretend.defer(lag=0.3 if rank == behind else 0.0003)
    pipe = made()
    losses = []
    for result in pipe.train_steps([(x, y)] * 4, torch.optim.SGD(pipe.parameters(), lr=0.1)):
        losses.append(float(result.loss))  # type: ignore[arg-type]
        if len(losses) == 2:
            break
    del pipe, result
    gc.collect()
    with made() as pipe:
        pipe.step(x, target=y)
        grads = {name: each.grad.cpu() for name, each in pipe.named_parameters() if each.grad is not None}
    assert grads
    return losses, max(float((each - wanted[name].grad).abs().max()) for name, each in grads.items())  # type: ignore[operator]


@pytest.mark.parametrize("behind", mostly_slow([0, 1], 0))
@pytest.mark.parametrize("family", mostly_slow(["1f1b", "zb-h1"], "zb-h1"))
def test_what_its_device_still_has_to_move_is_moved(family: str, behind: int) -> None:
    """`for result in pipe.train_steps(...): break` and another pipeline: the communicators of the first one were ended
    with receives of its last step on them, so that the other rank's sends, and that rank, waited until the timeout."""
    first, second = on_ranks(2, leave_a_loop_and_go_on, family, behind)
    assert first.value[0] == second.value[0]
    for outcome in (first, second):
        assert outcome.value[1] < 1e-6
        assert outcome.races == []
        assert outcome.deadlocks == []
