"""the same model with Penstock, in ten lines: the same losses and weights, under any schedule."""

import torch
from alone import check, make
from launch import run, say
from torch.nn import functional as F

from penstock import Pipeline


def main(rank, ranks):
    losses = []

    # The ten lines. Without a process group the same lines run too: the ranks are threads then.
    model, x, y = make()
    pipe = Pipeline(model, stages=ranks, microbatches=4, schedule="1f1b", loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=3, momentum=0.9)
    for _ in range(3):
        result = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())  # the batch's, the same on every rank

    slots = {action: slot for slot, action in enumerate(pipe.schedule.rank(rank)) if action is not None}
    say(f"rank {rank}: runs {' '.join(map(str, slots))}")
    now, log = 0, []
    for action in pipe.program.rank(rank):  # the schedule with its messages
        now = slots.get(action, now)
        if action is not None and "SEND" in str(action.op):
            peer = pipe.schedule.placement.rank_of(action.other_end)
            log.append((now, f"rank {rank} -> rank {peer}: {action}"))
    say(*log)
    say(*[f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)])

    names = list(dict(model.named_parameters()))
    own = dict(pipe.named_parameters())
    check(losses, own.values(), lambda weights: [weights[names.index(name)] for name in own])


if __name__ == "__main__":
    run(main, allowed=range(1, 5))
