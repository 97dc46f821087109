"""What a measured cut is worth: step time with stages balanced by time, against equal counts and parameter counts.

    penstock bench balance [--quick] [--json] [--rounds 9] [--schedules 1f1b,zb-v]

Two gloo processes train each of two nn.Sequential models, cut in three ways, in turn and in one run:

    gpt     a large embedding, which computes nothing; blocks that get wider; a head as large, which computes much
    unet    few channels on large images at both ends, many on small ones in the middle: time and parameters disagree

`load` is the most loaded rank's share of the measured time, against an even one: what the cut should make of a step
where nothing waits. Ratios are medians within rounds; below 1, balance by time is faster (see `common.Times`). Where
other work keeps the cores busy, both ranks wait for a core and the cut hardly shows in the time of a step; `busy`, the
slowest rank's processor time, still has it.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SEVERAL, THEIRS, Step, interleave, run_ranks
from report import Column, bench
from torch import Tensor, nn

import penstock
from penstock.model.balance.partition import counts_of, partition
from penstock.model.balance.profile import Weight, crossing_of, piece_weights, profile_layers
from penstock.schedule import Placement, build

SLACK = 0.02  # measured times that differ by less are equal: the bytes decide


class Block(nn.Module):
    """A transformer's block with an own width inside."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.first(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.shrink(F.gelu(self.grow(self.second(x))))


class Down(nn.Module):
    """Convolve, remember, halve: what was remembered travels along in the tuple."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *skips = value if isinstance(value, tuple) else (value,)
        x = F.gelu(self.convolve(x))
        return F.max_pool2d(x, 2), x, *skips


class Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return F.gelu(self.convolve(value[0])), *value[1:]


class Up(nn.Module):
    """Double, join with what was remembered, convolve."""

    def __init__(self, before: int, skip: int, after: int, last: bool = False) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(before + skip, after, 3, padding=1)
        self.last = last

    def forward(self, value: tuple[Tensor, ...]) -> Any:
        x, skip, *skips = value
        x = self.convolve(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return x if self.last else (F.gelu(x), *skips)


def gpt(quick: bool) -> tuple[nn.Sequential, Tensor, Tensor]:
    width, vocabulary, rows = (64, 500, 2) if quick else (128, 6000, 4)
    blocks = [Block(width, width * (1 + number // 2)) for number in range(10)]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary))
    ids = torch.randint(0, vocabulary, (rows * 8, 32))
    return model, ids, ids


def unet(quick: bool) -> tuple[nn.Sequential, Tensor, Tensor]:
    size, width = (16, 4) if quick else (48, 12)
    down = [Down(3, width), Down(width, 2 * width), Down(2 * width, 4 * width)]
    middle = [Middle(4 * width) for _ in range(4)]
    up = [Up(4 * width, 4 * width, 4 * width), Up(4 * width, 2 * width, 2 * width), Up(2 * width, width, 3, last=True)]
    x = torch.randn(16, 3, size, size)
    return nn.Sequential(*down, *middle, *up), x, x.tanh()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output, target)


def weigh(rank: int, model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[list[Weight], float]:
    """The layers, and the milliseconds of the loss; measured on the first rank while the others wait, known to all."""

    def agree(values: list[float]) -> list[float]:
        told = [values]
        dist.broadcast_object_list(told)
        return told[0]

    layers = list(model._modules.items())
    weights = profile_layers(layers, (x,), rounds=5, measured=rank == 0, agree=agree)
    output = model(x).detach().requires_grad_()
    loss = profile_layers([("loss", Loss())], (output, y), rounds=5, measured=rank == 0, agree=agree)
    return weights, loss[0].milliseconds


def cuts_by(weights: list[Weight], loss: float, stages: int, placement: Placement) -> dict[str, list[int]]:
    """The number of layers of each stage, in three ways."""
    count = len(weights)
    size, larger = divmod(count, stages)
    crossing = crossing_of(weights)
    found = {"equal": [size + 1] * larger + [size] * (stages - larger)}
    for way, slack, last in (("parameters", 0.0, 0.0), ("time", SLACK, loss)):
        base = [0.0] * (stages - 1) + [last]
        measured = piece_weights(way, weights)
        cuts = partition(measured, stages, crossing=crossing, placement=placement, base=base, slack=slack).cuts
        found[way] = counts_of(cuts, count)
    return found


def load(counts: list[int], weights: list[Weight], loss: float, placement: Placement) -> float:
    """The most loaded rank's measured time, against an even share."""
    loads, first = [0.0] * placement.ranks, 0
    loads[placement.rank_of(placement.stages - 1)] += loss
    for rank, count in zip(placement, counts, strict=True):
        loads[rank] += sum(weight.milliseconds for weight in weights[first : first + count])
        first += count
    return max(loads) * placement.ranks / sum(loads)


def measure(rank: int, settings: Namespace) -> None:
    columns = [Column("model", 5), Column("schedule", 16), Column("balance", 10), Column("layers per stage", 14)]
    columns += [Column("load", 5, "{:.2f}"), Column("ms", 7)]
    columns += [Column("time/this", 9, "{:.2f}"), Column("time/this, busy", 5, "{:.2f}", "busy")]
    title = "2 gloo ranks, 8 microbatches: ms a step; `time/this` below 1: balance by time is faster"
    table = settings.report.table(rank, title, columns)
    for name, make in (("gpt", gpt), ("unet", unet)):
        torch.manual_seed(0)
        model, x, y = make(settings.quick)
        weights, loss = weigh(rank, model, x[: len(x) // 8], y[: len(y) // 8])
        for family in settings.schedules:
            stages = 4 if family in SEVERAL else 2
            placement = build(family, 2, 8, stages // 2).placement
            ways = cuts_by(weights, loss, stages, placement)
            pipes = {
                way: penstock.Pipeline(
                    copy.deepcopy(model), balance=counts, microbatches=8, schedule=family, loss_fn=loss_of, timeout=60
                )
                for way, counts in ways.items()
            }
            steps: dict[str, Step] = {way: partial(pipe.step, x, target=y) for way, pipe in pipes.items()}
            times = interleave(steps, settings.rounds)
            for way, counts in ways.items():
                shown = " ".join(map(str, counts))
                cells = [name, family, way, shown, load(counts, weights, loss, placement), times.median(way) * 1e3]
                table.row(*cells, times.ratio("time", way), times.busy_ratio("time", way))
            for pipe in pipes.values():
                pipe.close()


def main() -> None:
    with bench(__doc__, 9, tuple(THEIRS), default=("1f1b", "zb-v")) as settings:
        run_ranks(measure, 2, settings)


if __name__ == "__main__":
    main()
