"""reduce-scatter: a sum of which every rank gets one piece."""

import torch
import torch.distributed as dist
from launch import run, say


def main(rank, ranks):
    mine = torch.arange(ranks) + 10 * rank  # number r of it is for rank r
    piece = torch.empty(1, dtype=mine.dtype)
    say(f"rank {rank}: adds {mine.tolist()}")

    dist.reduce_scatter_single(piece, mine)  # the output first; before torch 2.13 reduce_scatter_tensor

    say(*[f"rank {rank} -> rank {other}: {mine[other].item()}" for other in range(ranks) if other != rank])
    say(f"rank {rank}: has {piece.tolist()}, piece {rank} of the sum")
    assert piece.item() == sum(10 * other + rank for other in range(ranks))
    say("check: rank r has piece r of the sum, and nobody has all of it")


if __name__ == "__main__":
    run(main)
