"""sharded data parallelism: each rank keeps a piece of the weights and of the optimizer state, gathered for use."""

import torch
import torch.distributed as dist
from alone import check, make, share, train
from launch import run, say, to_others


def main(rank, ranks):
    model, x, y = make()
    rows, targets = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights]
    flat = torch.cat([weight.detach().flatten() for weight in weights])  # 576 numbers, to be cut evenly
    piece = flat.chunk(ranks)[rank].clone().requires_grad_()  # this rank's; the optimizer sees no other
    say(f"rank {rank}: keeps {len(piece)} of {len(flat)} weights, and has {len(rows)} of {len(x)} rows")
    log = [(1, line) for line in to_others(f"its {len(piece)} weights")]
    log += [(2, line) for line in to_others(f"{len(piece)} gradients, for the weights that each keeps")]

    def forward_and_backward():
        whole = torch.empty_like(flat)
        dist.all_gather_single(whole, piece.detach())  # unshard: all weights, as long as they are used
        for weight, values in zip(weights, whole.split(sizes), strict=True):
            weight.data, weight.grad = values.view(12, 12), None
        loss = share(model(rows), targets)
        loss.backward()
        gradients = torch.cat([weight.grad.flatten() for weight in weights])
        for weight in weights:
            weight.data, weight.grad = torch.empty(0), None  # reshard: only the piece is kept
        piece.grad = torch.empty_like(piece)
        dist.reduce_scatter_single(piece.grad, gradients)  # summed, and each rank gets those of its own piece
        return loss.detach()

    losses = train([piece], forward_and_backward, log)
    check(losses, [piece], lambda weights: [torch.cat([weight.flatten() for weight in weights]).chunk(ranks)[rank]])


if __name__ == "__main__":
    run(main, allowed=[1, 2, 3, 4, 6, 8, 9, 12, 16])
