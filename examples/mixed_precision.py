"""Mixed precision in a pipeline: bf16 beside one process, bit for bit, and fp16 with loss scaling.

A small network learns to add two numbers modulo 11. Run it as it is (ranks are threads), or with
`torchrun --nproc-per-node 4 examples/mixed_precision.py` (ranks are processes).
"""

from __future__ import annotations

import os

# Some virtual machines announce AMX and then stop the process that uses it, as torch does for bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

MODULUS, WIDTH, STAGES, MICROBATCHES, ROWS = 11, 64, 4, 4, 128


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(2 * MODULUS, WIDTH // 2), nn.Flatten(), *[Residual() for _ in range(5)], nn.Linear(WIDTH, MODULUS)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(0, MODULUS, (ROWS, 2), generator=torch.Generator().manual_seed(step))
    return numbers + torch.tensor([0, MODULUS]), numbers.sum(1) % MODULUS


def groups(model: nn.Module | penstock.Pipeline) -> list[dict[str, object]]:
    """No weight decay for norms and biases."""
    return penstock.parameter_groups(model, {("*.norm.*", "*.bias"): {"weight_decay": 0.0}})


def on_one_device(steps: int) -> list[float]:
    """What bf16 gives without a pipeline."""
    model = network()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    losses = []
    for step in range(steps):
        total = 0.0
        for x, y in zip(*(part.chunk(MICROBATCHES) for part in batch(step)), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            (loss / MICROBATCHES).backward()
            total += loss.item() / MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(precision: str, steps: int) -> tuple[list[float], float | None, int]:
    """Losses, accuracy on unseen pairs (None on ranks without the last stage), and how many steps were left out."""
    with penstock.Pipeline(
        network(), stages=STAGES, microbatches=MICROBATCHES, loss_fn=F.cross_entropy, precision=precision
    ) as pipe:
        optimizer = torch.optim.AdamW(groups(pipe), lr=3e-3)
        scaler = penstock.GradScaler(
            pipe, init_scale=2.0**26, enabled=precision == "fp16"
        )  # too high: it will find out
        losses, skipped = [], 0
        for step in range(steps):
            x, y = batch(step)
            result = pipe.step(x, target=y)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped += scaler.get_scale() < before
            losses.append(float(result.loss))
        x, y = batch(10**6)
        output = pipe.predict(x)
        right = None if output is None else (output.argmax(1) == y).float().mean().item()
        return losses, right, skipped


def main() -> None:
    torch.set_num_threads(1)
    steps = 150
    bf16, right, _ = train("bf16", steps)
    if right is not None:
        print(f"bf16: loss {bf16[0]:.3f} -> {bf16[-1]:.3f}, {right:.1%} right")
    worst = max(abs(one - other) for one, other in zip(bf16[:20], on_one_device(20), strict=True))
    if right is not None:
        print(f"bf16 against one process, 20 steps: losses differ by {worst:.1g} at the most")
    assert worst < 1e-6
    fp16, right, skipped = train("fp16", steps)
    if right is not None:
        print(f"fp16: loss {fp16[0]:.3f} -> {fp16[-1]:.3f}, {right:.1%} right, {skipped} steps left out")
    assert bf16[-1] < 0.5
    assert fp16[-1] < 0.5
    assert skipped > 0


if __name__ == "__main__":
    main()
