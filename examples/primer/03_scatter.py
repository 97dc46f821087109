"""scatter: the root cuts a tensor into one piece a rank."""

import torch
import torch.distributed as dist
from launch import run, say

ROOT = 0


def main(rank, ranks):
    whole = torch.arange(2 * ranks)
    pieces = list(whole.chunk(ranks)) if rank == ROOT else None  # only the root has them
    mine = torch.empty(2, dtype=torch.int64)
    say(*[f"rank {ROOT}: holds {whole.tolist()}"] if rank == ROOT else [])

    dist.scatter(mine, pieces, src=ROOT)  # the output first, then the input

    say(*[f"rank {ROOT} -> rank {rank}: {mine.tolist()}"] if rank != ROOT else [])
    say(f"rank {rank}: holds {mine.tolist()}")
    assert mine.tolist() == [2 * rank, 2 * rank + 1]
    say("check: rank r holds piece r, and the root kept its own")


if __name__ == "__main__":
    run(main)
