"""a pipeline in 1F1B order: each backward as soon as it can run, so that fewer outputs are kept for theirs."""

import torch
import torch.distributed as dist
from alone import check, make, receive, share, stage_of, train
from launch import run, say


def one_f_one_b(rank, ranks, count):
    """(time slot, F or B, microbatch), if each takes a slot: forwards until a gradient is back, then in turns."""
    forward = [(rank + n if n < ranks - rank else rank + 2 * n, "F", n) for n in range(count)]
    backward = [(2 * ranks - 1 - rank + 2 * n, "B", n) for n in range(count)]
    return sorted(forward + backward)


def main(rank, ranks):
    model, x, y = make()
    layers, stage = stage_of(model, rank, ranks)
    parts, targets = x.tensor_split(4), y.tensor_split(4)
    plan, log, most = one_f_one_b(rank, ranks, 4), [], min(4, ranks - rank)
    say(f"rank {rank}: runs {' '.join(f'{kind}{number}' for _, kind, number in plan)}, and keeps {most} at most")

    def forward_and_backward():
        kept, going, loss = {}, [], torch.zeros(())
        for slot, kind, number in plan:
            if kind == "F":
                part = receive(parts[number], rank - 1).requires_grad_() if rank > 0 else parts[number]
                output = stage(part) if rank < ranks - 1 else share(stage(part), targets[number])
                loss += output.detach() if rank == ranks - 1 else 0
                kept[number], leaving, peer = (part, output), output.detach(), rank + 1
                assert len(kept) <= most
            else:
                part, output = kept.pop(number)
                output.backward(receive(output, rank + 1) if rank < ranks - 1 else None)
                leaving, peer = part.grad, rank - 1
            if 0 <= peer < ranks:  # neighbours send to each other at the same time: nobody may wait in a send
                going.append(dist.isend(leaving, dst=peer))
                log.append((slot, f"rank {rank} -> rank {peer}: {kind}{number}; {len(kept)} kept"))
        for handle in going:
            handle.wait()
        return loss

    losses = train(stage.parameters(), forward_and_backward, log)
    check(losses, stage.parameters(), lambda weights: weights[layers])


if __name__ == "__main__":
    run(main, allowed=range(1, 5))
