"""gather: every rank's tensor to the root, side by side. The reverse of scatter."""

import torch
import torch.distributed as dist
from launch import run, say

ROOT = 0


def main(rank, ranks):
    mine = torch.tensor([rank, rank * rank])
    places = [torch.empty_like(mine) for _ in range(ranks)] if rank == ROOT else None
    say(f"rank {rank}: holds {mine.tolist()}")

    dist.gather(mine, places, dst=ROOT)

    say(*[f"rank {rank} -> rank {ROOT}: {mine.tolist()}"] if rank != ROOT else [])
    if rank == ROOT:
        assert [place.tolist() for place in places] == [[other, other * other] for other in range(ranks)]
    say(*[f"rank {ROOT}: now has {[place.tolist() for place in places]}"] if rank == ROOT else [])
    say("check: the root has every rank's tensor in the order of ranks, its own too")


if __name__ == "__main__":
    run(main)
