"""all-reduce: a reduce of which every rank gets the result; by sum, maximum or mean, and while other work is done."""

import torch
import torch.distributed as dist
from launch import run, say, to_others


def main(rank, ranks):
    mine = torch.tensor([rank + 1.0, 10.0 * rank])
    say(f"rank {rank}: adds {mine.tolist()}")

    total, most, mean = mine.clone(), mine.clone(), mine.clone()  # in place: each call needs a tensor of its own
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    handle = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)  # returns at once; do not touch `mean` yet
    meanwhile = sum(number * number for number in range(1000))
    handle.wait()  # now it is there

    say(*to_others(mine.tolist()))
    say(f"rank {rank}: sum {total.tolist()}, max {most.tolist()}, mean {mean.tolist()}")
    every = torch.tensor([[other + 1.0, 10.0 * other] for other in range(ranks)])  # the direct way
    assert total.tolist() == every.sum(0).tolist()
    assert most.tolist() == every.amax(0).tolist()
    assert torch.allclose(mean, every.mean(0))
    assert meanwhile == 332_833_500
    say("check: every rank has the same sum, maximum and mean")


if __name__ == "__main__":
    run(main)
