"""tensor parallelism by columns: every rank has some columns of each weight; forward and backward by hand."""

import torch
import torch.distributed as dist
from alone import alone, make
from launch import run, say
from torch.nn import functional as F

log = []


class Copy(torch.autograd.Function):
    """Every rank uses the whole input, so its gradient is the sum of what all ranks found."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        log.append("B: its part of the gradient of a layer's input")
        total = gradient.clone()
        dist.all_reduce(total)  # leave it out, and the program runs all the same, on wrong gradients
        return total


class Join(torch.autograd.Function):
    """The columns of all ranks side by side; in the backward, each rank keeps the gradient of its own."""

    @staticmethod
    def forward(context, columns):
        log.append("F: its columns of a layer's output")
        pieces = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, columns)  # autograd does not see through it: hence this class
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def main(rank, ranks):
    assert 12 % ranks == 0, f"12 columns cannot be shared evenly by {ranks} ranks; take 1, 2, 3, 4, 6 or 12"
    model, x, y = make()  # the whole batch on every rank; of each weight, only some columns are kept
    shards = [weight.detach().chunk(ranks)[rank].clone().requires_grad_() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(shards, lr=0.01)  # (a column of the product is a row of nn.Linear's weight)
    others = ", ".join(str(other) for other in range(ranks) if other != rank)
    say(f"rank {rank}: has {12 // ranks} of the 12 columns of every weight")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        hidden = x
        for shard in shards:
            hidden = Join.apply(F.gelu(F.linear(Copy.apply(hidden), shard)))
        loss = F.mse_loss(hidden, y)  # the same on every rank
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0 and others:
            say(*[(time, f"rank {rank} -> rank {others}: {what}") for time, what in enumerate(log)])
        say(f"step {step}: loss {losses[-1]:.6f}")

    expected_losses, expected = alone()
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close([shard.detach() for shard in shards], [weight.chunk(ranks)[rank] for weight in expected])
    say("check: losses and every rank's columns are those of one process")


if __name__ == "__main__":
    run(main)
