"""tensor parallelism by columns: every rank has some columns of a weight; forward and backward from the formulas."""

import torch
import torch.distributed as dist
from alone import make
from launch import run, say, to_others
from torch.nn import functional as F


def main(rank, ranks):
    model, x, y = make()  # all ranks have all rows
    whole = model[0].weight.detach().T.contiguous()  # Y = X A, with A of 12 x 12
    columns = whole.chunk(ranks, dim=1)[rank]  # A = [A0 A1 A2 A3]: this rank's
    say(f"rank {rank}: has all of X, and {columns.shape[1]} of the 12 columns of A")

    # Forward: Y = X A = [X A0, X A1, X A2, X A3]. Each rank computes its columns of Y and nobody's else.
    mine = x @ columns
    pieces = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(pieces, mine)
    output = torch.cat(pieces, dim=1)
    say(*to_others(f"F: its columns of Y, {mine.numel()} numbers"))

    # Backward: G = dL/dY comes from the loss, and is the same on all ranks, as Y is.
    gradient = 2 * (output - y) / y.numel()  # of the mean of squares
    own = gradient.chunk(ranks, dim=1)[rank]  # the columns of Y that this rank made
    for_columns = x.T @ own  # dL/dAr = Xᵀ Gr: nothing to send
    for_input = own @ columns.T  # dL/dX = G Aᵀ = G0 A0ᵀ + ... + G3 A3ᵀ: this rank has one summand
    dist.all_reduce(for_input)
    say(*to_others(f"B: its summand of dL/dX, {for_input.numel()} numbers"))

    x, whole = x.requires_grad_(), whole.requires_grad_()  # the direct way: one process and autograd
    loss = F.mse_loss(x @ whole, y)
    loss.backward()
    torch.testing.assert_close(output, (x @ whole).detach())
    torch.testing.assert_close(for_columns, whole.grad.chunk(ranks, dim=1)[rank])
    torch.testing.assert_close(for_input, x.grad)
    say("check: Y, dL/dX and every rank's columns of dL/dA are those of one process")


if __name__ == "__main__":
    run(main, allowed=[1, 2, 3, 4, 6, 12])
