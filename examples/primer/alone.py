"""The model, the data, and its training in one process, which the last programs must repeat on several."""

import torch
import torch._dynamo  # optimizers load it at their first use: here once, not once in every process
import torch.distributed as dist
from launch import say
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)  # sums in another order then still print the same digits


def make():
    """One seed: every rank that calls it has the same model and the same batch of 10 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(12, 12, bias=False), nn.GELU())])
    return model, torch.randn(10, 12), torch.randn(10, 12)


def alone():
    """Three steps; the loss of each, and the weights at the end. (Adam would hide gradients of a wrong scale.)"""
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=3, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [weight.detach() for weight in model.parameters()]


def share(outputs, targets):
    """Of the batch's mean-square loss, the share of some rows: their sum, divided by the size of the whole batch."""
    return F.mse_loss(outputs, targets, reduction="sum") / (10 * 12)


def train(weights, forward_and_backward, log=()):
    """The same three steps around another forward and backward, which returns this rank's share of the batch's loss.

    `log` is where it notes what it sends; of that, the first step's is said.
    """
    optimizer = torch.optim.SGD(weights, lr=3, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = forward_and_backward()
        optimizer.step()
        dist.all_reduce(loss)  # to be printed; the training does not need it
        losses.append(loss.item())
        say(*log if step == 0 else [])
        say(f"step {step}: loss {loss:.6f}")
    return losses


def check(losses, weights, mine=lambda weights: weights):
    """Are they those of one process? `mine` cuts what this rank has out of all weights."""
    expected_losses, expected = alone()
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close([weight.detach() for weight in weights], mine(expected))
    say("check: the losses, and the weights of every rank, are those of one process")


def columns_and_rows(weights, rank, ranks):
    """The rank's columns of layers 0 and 2 (nn.Linear's weight is A transposed: its rows), and rows of 1 and 3."""
    return [weight.detach().tensor_split(ranks, dim=number % 2)[rank] for number, weight in enumerate(weights)]


def stage_of(model, rank, ranks):
    """Which layers are the rank's, as a slice, and these layers, each with its GELU; on four ranks, one each."""
    numbers = torch.arange(4).tensor_split(ranks)[rank].tolist()
    layers = slice(numbers[0], numbers[-1] + 1)
    return layers, model[2 * layers.start : 2 * layers.stop]


def receive(like, peer):
    """A tensor from `peer`; its shape and dtype, which must be known before, are those of `like`."""
    arrived = torch.empty_like(like)
    dist.recv(arrived, src=peer)
    return arrived


if __name__ == "__main__":
    for step, loss in enumerate(alone()[0]):
        print(f"step {step}: loss {loss:.6f}")
