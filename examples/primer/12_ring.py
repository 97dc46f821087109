"""ring all-reduce by hand: 2 (n - 1) rounds, in each of which every rank sends one piece to its right."""

import torch
import torch.distributed as dist
from launch import run, say


def exchange(piece, right, left):
    """Send to the right and receive from the left at the same time: nobody waits for anybody's turn."""
    arrived = torch.empty_like(piece)
    for work in [dist.isend(piece, right), dist.irecv(arrived, left)]:
        work.wait()
    return arrived


def main(rank, ranks):
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    whole = torch.arange(ranks) + 10 * rank
    pieces, sent = list(whole.clone().chunk(ranks)), 0
    say(f"rank {rank}: adds {whole.tolist()}")

    for turn in range(ranks - 1):  # reduce-scatter: each piece goes around and grows by one rank's part a round
        out, into = (rank - turn) % ranks, (rank - turn - 1) % ranks
        say(f"rank {rank} -> rank {right}: piece {out}, so far {pieces[out].tolist()}")
        pieces[into] = pieces[into] + exchange(pieces[out], right, left)
        sent += pieces[out].nbytes
    say(f"rank {rank}: has piece {right} of the sum: {pieces[right].tolist()}")

    for turn in range(ranks - 1):  # all-gather: each finished piece goes around once more
        out, into = (right - turn) % ranks, (right - turn - 1) % ranks
        say(f"rank {rank} -> rank {right}: piece {out}, finished {pieces[out].tolist()}")
        pieces[into] = exchange(pieces[out], right, left)
        sent += pieces[out].nbytes

    dist.all_reduce(whole)
    assert torch.cat(pieces).tolist() == whole.tolist()
    assert sent == 2 * (ranks - 1) * whole.nbytes // ranks
    say(f"check: all ranks have the sum {whole.tolist()}; each sent {sent} bytes, its tensor has {whole.nbytes}")


if __name__ == "__main__":
    run(main)
