"""all-to-all: every rank has a piece for every rank; a transpose over ranks. Experts of a mixture work by it."""

import torch
import torch.distributed as dist
from launch import run, say


def main(rank, ranks):
    # Pieces need not be alike: rank r sends r + 1 numbers to rank 0 and one to each other rank.
    sizes = [rank + 1 if other == 0 else 1 for other in range(ranks)]
    coming = [other + 1 if rank == 0 else 1 for other in range(ranks)]  # the receiver must know them too
    mine = torch.cat([torch.full((size,), 10 * rank + other) for other, size in enumerate(sizes)])
    theirs = torch.empty(sum(coming), dtype=mine.dtype)
    say(f"rank {rank}: holds {mine.tolist()}")

    dist.all_to_all_single(theirs, mine, output_split_sizes=coming, input_split_sizes=sizes)

    pieces = [piece.tolist() for piece in mine.split(sizes)]
    say(*[f"rank {rank} -> rank {other}: {pieces[other]}" for other in range(ranks) if other != rank])
    say(f"rank {rank}: now has {theirs.tolist()}")
    assert theirs.tolist() == [10 * other + rank for other, size in enumerate(coming) for _ in range(size)]
    say("check: rank r has what every rank had for r, in the order of ranks")


if __name__ == "__main__":
    run(main)
