"""broadcast: the root's tensor to every rank."""

import torch
import torch.distributed as dist
from launch import run, say, to_others

ROOT = 0


def main(rank, ranks):
    tensor = torch.tensor([3, 1, 4]) if rank == ROOT else torch.zeros(3, dtype=torch.int64)
    say(f"rank {rank}: before {tensor.tolist()}")

    dist.broadcast(tensor, src=ROOT)  # in place; every rank calls it, the root too

    say(*to_others(tensor.tolist()) if rank == ROOT else [])
    say(f"rank {rank}: after {tensor.tolist()}")
    assert tensor.tolist() == [3, 1, 4]
    say("check: every rank holds the root's tensor")


if __name__ == "__main__":
    run(main)
