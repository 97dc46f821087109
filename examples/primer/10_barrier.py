"""barrier: nobody goes on before everybody has come."""

import time

import torch
import torch.distributed as dist
from launch import run, say


def main(rank, ranks):
    say(f"rank {rank}: works for {50 * rank} ms, then comes to the barrier")
    time.sleep(0.05 * rank)
    came = time.monotonic()  # processes of one machine share this clock

    dist.barrier()

    left = time.monotonic()
    times = torch.tensor([came, left], dtype=torch.float64)
    table = [torch.empty_like(times) for _ in range(ranks)]
    dist.all_gather(table, times)
    say(f"rank {rank}: {'is the last to come' if rank == ranks - 1 else 'waits for those who come later'}")
    last = max(came for came, _ in table)
    assert all(left >= last for _, left in table)
    say("check: the first to leave left after the last had come")


if __name__ == "__main__":
    run(main)
