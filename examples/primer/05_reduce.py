"""reduce: the sum of every rank's tensor, on the root alone."""

import torch
import torch.distributed as dist
from launch import run, say

ROOT = 0


def main(rank, ranks):
    tensor = torch.tensor([rank + 1, 10 * (rank + 1)])
    mine = tensor.clone()
    say(f"rank {rank}: adds {mine.tolist()}")

    dist.reduce(tensor, dst=ROOT, op=dist.ReduceOp.SUM)  # in place; elsewhere than on the root, use it no more

    say(*[f"rank {rank} -> rank {ROOT}: {mine.tolist()}"] if rank != ROOT else [])
    direct = sum(range(1, ranks + 1))
    if rank == ROOT:
        assert tensor.tolist() == [direct, 10 * direct]  # the root's own is in the sum
    say(*[f"rank {ROOT}: has the sum {tensor.tolist()}"] if rank == ROOT else [])
    say("check: the root has the sum over all ranks")


if __name__ == "__main__":
    run(main)
