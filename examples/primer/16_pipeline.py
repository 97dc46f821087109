"""pipeline parallelism by hand: every rank has some layers; microbatches go forward, then their gradients back."""

import torch
import torch.distributed as dist
from alone import alone, make
from launch import run, say
from torch.nn import functional as F


def main(rank, ranks):
    assert ranks <= 4, f"4 layers cannot fill {ranks} ranks; take 4 at most"
    model, x, y = make()
    layers = torch.arange(4).tensor_split(ranks)[rank].tolist()
    stage = model[2 * layers[0] : 2 * layers[-1] + 2]  # a layer and its GELU are two modules
    parts, targets = x.tensor_split(4), y.tensor_split(4)  # microbatches of 3, 3, 2 and 2 rows
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    say(f"rank {rank}: has layers {layers}")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        inputs, outputs, log = [], [], []
        for number, part in enumerate(parts):  # all forwards: everything flows to the right
            if rank > 0:
                part = torch.empty_like(part)
                dist.recv(part, src=rank - 1)
                part.requires_grad_()  # its gradient is what goes back to the left
            output = stage(part)
            if rank < ranks - 1:
                dist.send(output.detach(), dst=rank + 1)
                log.append((rank + number, f"rank {rank} -> rank {rank + 1}: F{number}, {len(part)} rows"))
            else:
                output = F.mse_loss(output, targets[number], reduction="sum") / y.numel()
            inputs.append(part)
            outputs.append(output)  # kept, with its graph, until its backward
        for number, (part, output) in enumerate(zip(inputs, outputs, strict=True)):  # all backwards: to the left
            gradient = None
            if rank < ranks - 1:
                gradient = torch.empty_like(output)
                dist.recv(gradient, src=rank + 1)
            output.backward(gradient)
            if rank > 0:
                dist.send(part.grad, dst=rank - 1)
                log.append((9 + ranks - rank + number, f"rank {rank} -> rank {rank - 1}: B{number}, {len(part)} rows"))
        optimizer.step()
        loss = sum(outputs).detach() if rank == ranks - 1 else torch.zeros(())
        dist.broadcast(loss, src=ranks - 1)  # to be printed
        losses.append(loss.item())
        say(*log if step == 0 else [])
        say(f"step {step}: loss {losses[-1]:.6f}")

    expected_losses, expected = alone()
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close([w.detach() for w in stage.parameters()], [expected[layer] for layer in layers])
    say("check: losses and every rank's layers are those of one process")


if __name__ == "__main__":
    run(main)
