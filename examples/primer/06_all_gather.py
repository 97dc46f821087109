"""all-gather: a gather of which every rank gets the result."""

import torch
import torch.distributed as dist
from launch import run, say, to_others


def main(rank, ranks):
    mine = torch.tensor([rank, rank * rank])
    everything = torch.empty(2 * ranks, dtype=mine.dtype)  # one tensor for all pieces
    say(f"rank {rank}: holds {mine.tolist()}")

    dist.all_gather_single(everything, mine)  # the output first; before torch 2.13 all_gather_into_tensor

    say(*to_others(mine.tolist()))
    say(f"rank {rank}: now has {everything.tolist()}")
    assert everything.tolist() == [number for other in range(ranks) for number in (other, other * other)]
    say("check: every rank has every rank's tensor, in the order of ranks")


if __name__ == "__main__":
    run(main)
