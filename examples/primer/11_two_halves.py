"""all-reduce = reduce-scatter + all-gather: the same sum in two halves, with work possible between them."""

import torch
import torch.distributed as dist
from launch import run, say, to_others


def main(rank, ranks):
    mine = torch.arange(ranks) + 10 * rank
    say(f"rank {rank}: adds {mine.tolist()}")

    at_once = mine.clone()
    dist.all_reduce(at_once)

    piece = torch.empty(1, dtype=mine.dtype)
    dist.reduce_scatter_single(piece, mine)  # first half: each rank has one piece of the sum
    say(*[f"rank {rank} -> rank {other}: {mine[other].item()}" for other in range(ranks) if other != rank])
    say(f"rank {rank}: has piece {rank} of the sum: {piece.tolist()}")

    in_halves = torch.empty_like(mine)
    dist.all_gather_single(in_halves, piece)  # second half: each rank collects the other pieces
    say(*to_others(piece.tolist()))
    say(f"rank {rank}: has the sum {in_halves.tolist()}")

    assert in_halves.tolist() == at_once.tolist()
    assert in_halves.tolist() == [sum(10 * other + place for other in range(ranks)) for place in range(ranks)]
    say("check: the two halves give what all_reduce gives")


if __name__ == "__main__":
    run(main)
