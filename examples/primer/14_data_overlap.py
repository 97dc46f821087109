"""data parallelism with overlap: a layer's gradients are under way while the backward works on earlier layers."""

import torch.distributed as dist
from alone import check, make, share, train
from launch import run, say, to_others


def main(rank, ranks):
    model, x, y = make()
    rows, targets = x.tensor_split(ranks)[rank], y.tensor_split(ranks)[rank]
    weights = list(model.parameters())
    going, log = [], []
    say(f"rank {rank}: has all weights and {len(rows)} of {len(x)} rows")

    def leave(weight):  # autograd calls it as soon as this weight's gradient is complete
        handle = dist.all_reduce(weight.grad, async_op=True)  # in place, and returns at once
        going.append(handle)
        missing = sum(other.grad is None for other in weights)
        what = f"layer {missing}'s gradient; layers without one: {missing}"
        log.extend((len(log), line) for line in to_others(what))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(leave)  # the last layer's comes first, on every rank

    def forward_and_backward():
        going.clear()
        loss = share(model(rows), targets)
        loss.backward()
        for handle in going:
            handle.wait()  # before the optimizer looks at the gradients
        return loss.detach()

    check(train(weights, forward_and_backward, log), weights)


if __name__ == "__main__":
    run(main)
