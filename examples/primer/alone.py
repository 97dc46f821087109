"""One process, no parallelism: the model, the data and the training that the last programs must repeat."""

import torch
import torch._dynamo  # optimizers load it at their first use: here once, not once in every process
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)  # sums in another order then still print the same digits


def make():
    """One seed: every rank that calls it has the same model and the same batch of 10 rows."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(12, 12, bias=False), nn.GELU())])
    return model, torch.randn(10, 12), torch.randn(10, 12)


def alone():
    """Three steps; the loss of each, and the weights at the end."""
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [weight.detach() for weight in model.parameters()]


if __name__ == "__main__":
    for step, loss in enumerate(alone()[0]):
        print(f"step {step}: loss {loss:.6f}")
