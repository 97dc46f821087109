"""send and recv: one rank speaks, another listens; and who speaks first when all form a ring."""

import torch
import torch.distributed as dist
from launch import run, say


def main(rank, ranks):
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    mine = torch.tensor([10 * rank, 10 * rank + 1])
    theirs = torch.empty_like(mine)  # a receive writes into memory: shape and dtype must be known before
    say(f"rank {rank}: is one of {ranks} (0 to {ranks - 1}) and holds {mine.tolist()}")

    # A send may return only when its receive is there. If all ranks sent first, all could wait for ever:
    # so the even ones send first, and the odd ones listen first.
    if ranks == 1:
        theirs.copy_(mine)  # nobody to send to
    elif rank % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    say(f"rank {rank} -> rank {right}: {mine.tolist()}")

    say(f"rank {rank}: got {theirs.tolist()}")
    assert theirs.tolist() == [10 * left, 10 * left + 1]
    say("check: every rank got what its left neighbour holds")


if __name__ == "__main__":
    run(main)
