"""pipeline parallelism with overlap: 1F1B, messages under way while ranks compute, both directions at once."""

import torch
import torch.distributed as dist
from alone import alone, make
from launch import run, say
from torch.nn import functional as F


def one_f_one_b(rank, ranks, count):
    """(time slot, F or B, microbatch), if each takes a slot: forwards until a gradient is back, then in turns."""
    forward = [(rank + n if n < ranks - rank else rank + 2 * n, "F", n) for n in range(count)]
    backward = [(2 * ranks - 1 - rank + 2 * n, "B", n) for n in range(count)]
    return sorted(forward + backward)


def receive(kind, number, parts, rank, ranks):
    """Ask for what an action needs, and do not wait for it."""
    peer = rank - 1 if kind == "F" else rank + 1
    if not 0 <= peer < ranks:
        return None, None  # the data at one end, the loss at the other
    buffer = torch.empty_like(parts[number])
    return buffer, dist.irecv(buffer, src=peer)


def main(rank, ranks):
    assert ranks <= 4, f"4 layers cannot fill {ranks} ranks; take 4 at most"
    model, x, y = make()
    layers = torch.arange(4).tensor_split(ranks)[rank].tolist()
    stage = model[2 * layers[0] : 2 * layers[-1] + 2]
    parts, targets = x.tensor_split(4), y.tensor_split(4)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    plan = one_f_one_b(rank, ranks, len(parts))
    say(f"rank {rank}: has layers {layers}, runs {' '.join(f'{kind}{number}' for _, kind, number in plan)}")
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        kept, going, loss, log = {}, [], torch.zeros(()), []
        following = receive(*plan[0][1:], parts, rank, ranks)
        for place, (slot, kind, number) in enumerate(plan):
            (buffer, arrival), following, coming = following, (None, None), ""
            if place + 1 < len(plan):  # what the next action needs comes in while this one computes
                following = receive(*plan[place + 1][1:], parts, rank, ranks)
                coming = f" | meanwhile {plan[place + 1][1]}{plan[place + 1][2]} may come in" * (
                    following[1] is not None
                )
            if arrival is not None:
                arrival.wait()
            log.append((2 * slot, f"rank {rank}: {kind}{number}{coming}"))
            if kind == "F":
                part = parts[number] if buffer is None else buffer.requires_grad_()
                output = stage(part)
                if rank == ranks - 1:
                    output = F.mse_loss(output, targets[number], reduction="sum") / y.numel()
                    loss += output.detach()
                kept[number], leaving, peer = (part, output), output.detach(), rank + 1
            else:
                part, output = kept.pop(number)
                output.backward(buffer)
                leaving, peer = part.grad, rank - 1
            if 0 <= peer < ranks:  # it leaves while the next one computes; the tensor must live until it has left
                going.append((leaving, dist.isend(leaving, dst=peer)))
                log.append((2 * slot + 1, f"rank {rank} -> rank {peer}: {kind}{number}"))
        for _, sent in going:
            sent.wait()
        optimizer.step()
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
