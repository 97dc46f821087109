"""pipeline parallelism by hand: every rank has some layers; microbatches go forward, then their gradients back."""

import torch
import torch.distributed as dist
from alone import check, make, receive, share, stage_of, train
from launch import run, say


def main(rank, ranks):
    model, x, y = make()
    layers, stage = stage_of(model, rank, ranks)
    first, last, log = rank == 0, rank == ranks - 1, []
    parts, targets = x.tensor_split(4), y.tensor_split(4)  # microbatches of 3, 3, 2 and 2 rows
    say(f"rank {rank}: has layers {[0, 1, 2, 3][layers]}")

    def forward_and_backward():
        kept, loss = [], torch.zeros(())
        for number, part in enumerate(parts):  # all forwards: everything flows to the right
            if not first:
                part = receive(part, rank - 1).requires_grad_()  # its gradient is what goes back to the left
            output = stage(part)
            if last:
                output = share(output, targets[number])
                loss += output.detach()
            else:
                dist.send(output.detach(), dst=rank + 1)
                log.append((rank + number, f"rank {rank} -> rank {rank + 1}: F{number}, {len(part)} rows"))
            kept.append((part, output))  # with its graph, until its backward
        for number, (part, output) in enumerate(kept):  # all backwards: everything flows to the left
            output.backward(None if last else receive(output, rank + 1))
            if not first:
                dist.send(part.grad, dst=rank - 1)
                log.append((9 + ranks - rank + number, f"rank {rank} -> rank {rank - 1}: B{number}, {len(part)} rows"))
        return loss

    losses = train(stage.parameters(), forward_and_backward, log)
    check(losses, stage.parameters(), lambda weights: weights[layers])


if __name__ == "__main__":
    run(main, allowed=range(1, 5))
