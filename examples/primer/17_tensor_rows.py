"""tensor parallelism by rows, the mirror image: a sum in the forward, and nothing to send in the backward."""

import torch
import torch.distributed as dist
from alone import make
from launch import run, say, to_others
from torch.nn import functional as F


def main(rank, ranks):
    model, x, y = make()
    whole = model[0].weight.detach().T.contiguous()  # Y = X A again
    rows = whole.tensor_split(ranks)[rank]  # A0 above A1 above A2 above A3: this rank's
    part = x.tensor_split(ranks, dim=1)[rank]  # X = [X0 X1 X2 X3]: of X, only what these rows are multiplied with
    say(f"rank {rank}: has {len(rows)} of the 12 rows of A, and as many columns of X")

    # Forward: Y = X0 A0 + X1 A1 + X2 A2 + X3 A3. Each rank has a summand, of the size of all of Y.
    output = part @ rows
    dist.all_reduce(output)
    say(*to_others(f"F: its summand of Y, {output.numel()} numbers"))

    # Backward: G = dL/dY is the same on all ranks, as Y is; and each summand's gradient is G itself.
    gradient = 2 * (output - y) / y.numel()
    for_rows = part.T @ gradient  # dL/dAr = Xrᵀ G: nothing to send
    for_part = gradient @ rows.T  # dL/dXr = G Arᵀ: complete, because no other rank has used Xr. Nothing to send

    x, whole = x.requires_grad_(), whole.requires_grad_()  # the direct way
    loss = F.mse_loss(x @ whole, y)
    loss.backward()
    torch.testing.assert_close(output, (x @ whole).detach())
    torch.testing.assert_close(for_rows, whole.grad.tensor_split(ranks)[rank])
    torch.testing.assert_close(for_part, x.grad.tensor_split(ranks, dim=1)[rank])
    say("check: Y and every rank's rows of dL/dA and columns of dL/dX are those of one process")


if __name__ == "__main__":
    run(main, allowed=range(1, 13))
