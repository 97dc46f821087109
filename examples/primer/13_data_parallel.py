"""data parallelism by hand: every rank has the whole model and some rows of the batch; gradients are summed."""

import torch
import torch.distributed as dist
from alone import alone, make
from launch import run, say
from torch.nn import functional as F


def main(rank, ranks):
    model, x, y = make()  # all weights on every rank, and an optimizer state each
    rows, targets = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]  # in practice, load only these
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=0.01)
    others = ", ".join(str(other) for other in range(ranks) if other != rank)
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
        if step == 0 and others:
            say(f"rank {rank} -> rank {others}: {len(bucket)} gradients from its {len(rows)} rows")
        say(f"step {step}: loss {losses[-1]:.6f}")

    expected_losses, expected = alone()
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close([weight.detach() for weight in weights], expected)
    say("check: losses and weights are those of one process on the whole batch")


if __name__ == "__main__":
    run(main)
