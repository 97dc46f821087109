"""tensor parallelism in pairs: one weight by columns, the next by rows; half as many messages."""

import torch
import torch.distributed as dist
from alone import alone, make
from launch import run, say
from torch.nn import functional as F

log = []


class Copy(torch.autograd.Function):
    """Before columns: the input as it is; in the backward, the sum over ranks of its gradient."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed("B: its part of the gradient of a pair's input", gradient)


class Sum(torch.autograd.Function):
    """After rows, the mirror image: the sum over ranks; in the backward, the gradient as it is."""

    @staticmethod
    def forward(context, x):
        return summed("F: its part of a pair's output", x)

    @staticmethod
    def backward(context, gradient):
        return gradient


def summed(what, tensor):
    log.append(what)
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def shard(weights, rank, ranks):
    """Layers 0 and 2 by columns (the rows of nn.Linear's weight), 1 and 3 by rows; the pieces need not be alike."""
    return [weight.detach().tensor_split(ranks, dim=place % 2)[rank].clone() for place, weight in enumerate(weights)]


def main(rank, ranks):
    model, x, y = make()
    shards = [piece.requires_grad_() for piece in shard(model.parameters(), rank, ranks)]
    optimizer = torch.optim.AdamW(shards, lr=0.01)
    others = ", ".join(str(other) for other in range(ranks) if other != rank)
    say(f"rank {rank}: has {len(shards[0])} columns of layers 0 and 2, and as many rows of 1 and 3")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        hidden = x
        for columns, rows in zip(shards[0::2], shards[1::2], strict=True):
            part = F.gelu(F.linear(Copy.apply(hidden), columns))  # GELU of a column needs no other: nothing is sent
            hidden = F.gelu(Sum.apply(F.linear(part, rows)))
        loss = F.mse_loss(hidden, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0 and others:
            say(*[(time, f"rank {rank} -> rank {others}: {what}") for time, what in enumerate(log)])
        say(f"step {step}: loss {losses[-1]:.6f}")

    expected_losses, expected = alone()
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close([piece.detach() for piece in shards], shard(expected, rank, ranks))
    say("check: losses and every rank's columns and rows are those of one process")


if __name__ == "__main__":
    run(main)
