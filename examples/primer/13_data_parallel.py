"""data parallelism by hand: every rank has the whole model and some rows of the batch; gradients are summed."""

import torch
import torch.distributed as dist
from alone import check, make
from launch import run, say, to_others
from torch.nn import functional as F


def main(rank, ranks):
    model, x, y = make()  # all weights on every rank, and an optimizer state each
    rows, targets = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]  # in practice, load only these
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=3, momentum=0.9)
    say(f"rank {rank}: has all {sum(sizes)} weights and {len(rows)} of {len(x)} rows")
    losses = []
    for step in range(3):
        optimizer.zero_grad()  # without it, the sums of earlier steps would be summed again
        loss = F.mse_loss(model(rows), targets, reduction="sum") / y.numel()  # its share of the batch's mean
        loss.backward()
        bucket = torch.cat([weight.grad.flatten() for weight in weights])
        dist.all_reduce(bucket)  # the only difference to one process; one message, not one a weight
        for weight, summed in zip(weights, bucket.split(sizes), strict=True):
            weight.grad.copy_(summed.view_as(weight))
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)  # to be printed
        losses.append(total.item())
        say(*to_others(f"{len(bucket)} gradients from its {len(rows)} rows") if step == 0 else [])
        say(f"step {step}: loss {losses[-1]:.6f}")
    check(losses, weights)


if __name__ == "__main__":
    run(main)
