"""a pipeline with overlap: a rank computes one microbatch while the next comes in and the one before leaves."""

import torch
import torch.distributed as dist
from alone import check, make, share, stage_of, train
from launch import run


def arriving(likes, peer):
    """Each tensor from `peer` when it is there. All are asked for at once: the later ones travel meanwhile."""
    buffers = [torch.empty_like(like) for like in likes]
    handles = [dist.irecv(buffer, src=peer) for buffer in buffers]  # these calls return at once
    for buffer, handle in zip(buffers, handles, strict=True):
        handle.wait()
        yield buffer


def main(rank, ranks):
    model, x, y = make()
    layers, stage = stage_of(model, rank, ranks)
    first, last, log = rank == 0, rank == ranks - 1, []
    parts, targets = x.tensor_split(4), y.tensor_split(4)

    def forward_and_backward():
        inputs, outputs, going = [], [], []

        def send(time, what, tensor, peer):  # it leaves while the next one computes
            going.append(dist.isend(tensor, dst=peer))
            log.append((time, f"rank {rank} -> rank {peer}: {what}; sends not waited for: {len(going)}"))

        for number, part in enumerate(parts if first else arriving(parts, rank - 1)):
            output = stage(part.requires_grad_(not first))
            inputs.append(part)
            outputs.append(share(output, targets[number]) if last else output)
            if not last:
                send(rank + number, f"F{number}", output.detach(), rank + 1)
        for number, gradient in enumerate([None] * 4 if last else arriving(outputs, rank + 1)):
            outputs[number].backward(gradient)
            if not first:
                send(9 + ranks - rank + number, f"B{number}", inputs[number].grad, rank - 1)
        for handle in going:
            handle.wait()  # what is being sent must live, and stay as it is, until then
        return sum(outputs).detach() if last else torch.zeros(())

    losses = train(stage.parameters(), forward_and_backward, log)
    check(losses, stage.parameters(), lambda weights: weights[layers])


if __name__ == "__main__":
    run(main, allowed=range(1, 5))
