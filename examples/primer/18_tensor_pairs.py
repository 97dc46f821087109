"""tensor parallelism in pairs: columns, then rows, with nothing to send in between; the whole model trained so."""

import torch
import torch.distributed as dist
from alone import check, columns_and_rows, make, train
from launch import run, say, to_others
from torch.nn import functional as F

log = []


class Sum(torch.autograd.Function):
    """A sum over ranks one way, "F" or "B"; the other way, what comes goes on as it is. Autograd sees no messages."""

    @staticmethod
    def forward(context, tensor, way):
        context.way = way
        return summed(tensor, "F: its summand of a pair's output") if way == "F" else tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, "B: its summand of dL/dX of a pair") if context.way == "B" else gradient, None


def summed(tensor, what):
    log.extend((len(log), line) for line in to_others(what))
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def main(rank, ranks):
    model, x, y = make()
    shards = [piece.clone().requires_grad_() for piece in columns_and_rows(model.parameters(), rank, ranks)]
    say(f"rank {rank}: has {len(shards[0])} columns of layers 0 and 2, and as many rows of 1 and 3")

    def forward_and_backward():
        hidden = x
        for columns, rows in zip(shards[0::2], shards[1::2], strict=True):
            part = F.gelu(F.linear(Sum.apply(hidden, "B"), columns))  # GELU needs no other column
            hidden = F.gelu(Sum.apply(F.linear(part, rows), "F"))  # but GELU of a sum needs the whole sum
        loss = F.mse_loss(hidden, y)
        loss.backward()
        return loss.detach() / ranks  # its share: every rank has the whole loss

    losses = train(shards, forward_and_backward, log)
    check(losses, shards, lambda weights: columns_and_rows(weights, rank, ranks))


if __name__ == "__main__":
    run(main, allowed=range(1, 13))
