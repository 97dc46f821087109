"""U-Net segmentation: long skips between distant stages, batch norms that see whole batches, odd image sizes.

The network is an ordinary module. Penstock cuts it into four stages with one example, finds the four skips, and sends
each straight to the stage that needs it. Run it as it is (ranks are threads), or with
`torchrun --nproc-per-node 4 examples/unet_segmentation.py` (ranks are processes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

SIZE, STAGES, MICROBATCHES, ROWS, STEPS = 29, 4, 4, 24, 40


def double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first in (inputs, outputs):
        layers += [nn.Conv2d(first, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels down, four up, each joined with its equal on the other side."""

    def __init__(self, widths: tuple[int, ...] = (8, 12, 16, 24), bottom: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.bottom = double(widths[-1], bottom)
        self.up = nn.ModuleList(
            double(a + b, b) for a, b in zip((bottom, *widths[:0:-1]), reversed(widths), strict=True)
        )
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.bottom(x)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, skip.shape[2:], mode="nearest")  # also where the size was odd
            x = level(torch.cat([x, skip], dim=1))
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Bright discs in noise, and where they are."""
    numbers = torch.Generator().manual_seed(step)
    places = torch.arange(SIZE, dtype=torch.float32)
    center, radius = (
        torch.rand(2, ROWS, 1, 1, generator=numbers) * SIZE,
        6 + 6 * torch.rand(ROWS, 1, 1, generator=numbers),
    )
    mask = ((places.view(1, -1, 1) - center[0]) ** 2 + (places.view(1, 1, -1) - center[1]) ** 2 < radius**2).float()
    image = mask + 0.5 * torch.randn(ROWS, SIZE, SIZE, generator=numbers)
    return image.unsqueeze(1), mask.unsqueeze(1)


def overlap(logits: Tensor, mask: Tensor) -> float:
    found, wanted = logits > 0, mask > 0.5
    return ((found & wanted).sum() / (found | wanted).sum()).item()


def main() -> None:
    torch.manual_seed(0)
    model, (x, _) = UNet(), batch(0)
    pipe = penstock.Pipeline(
        model,
        stages=STAGES,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        example=(x[:4],),
        loss_fn=F.binary_cross_entropy_with_logits,
        batch_options=penstock.BatchOptions(batch_norm="deferred"),
        recompute="except_last",
    )
    skips = [(a, b) for a, b in pipe.schedule.topology.edges if b > a + 1]
    print(pipe.describe())
    print(f"values that skip stages: {skips}")
    assert skips
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)  # so that running statistics catch up
    for step in range(STEPS):
        images, masks = batch(step)
        result = pipe.step(images, target=masks)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {result.loss:.3f}")
    images, masks = batch(1000)
    found = pipe.predict(images)  # None on ranks without the last stage
    if found is not None:
        score = overlap(found, masks)
        print(f"overlap with the true discs, on images it has not seen: {score:.2f}")
        assert score > 0.7
    tracked = {int(value) for name, value in pipe.named_buffers() if name.endswith("num_batches_tracked")}
    assert tracked == {STEPS}, tracked  # once per batch, not once per microbatch
    pipe.close()


if __name__ == "__main__":
    main()
