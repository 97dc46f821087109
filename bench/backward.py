"""What splitting the backward costs: I + W against B, here and in torch.distributed.pipelining, side by side.

    penstock bench backward [--quick] [--json] [--rounds 200]

Every round runs each variant once on the same model and input, in a new order, so that a noisy machine is noisy for
all and none always finds the memory as the same other one left it. A ratio is the median of the rounds' ratios, each
taken within one round. Gradients are accumulated, as between the first and the last microbatch of a step. One thread.

    I+W/B      our I and W against the plain backward
    F'/F       a recorded forward against a plain one
    all        our F, I and W against plain F and B
    torch      torch's stage_backward_input and stage_backward_weight against the plain backward
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
from common import Block
from report import Column, bench
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode


def convolutions() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(3)])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "8 x Linear(8, 8), batch 4": (lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]), (4, 8), 10.0),
    "block 64, 2 x 32 tokens": (lambda: Block(64, 4), (2, 32, 64), 5.0),
    "block 384, 2 x 128 tokens": (lambda: Block(384, 6), (2, 128, 384), 1.0),
    "3 x Conv2d(32, 32), 4 x 24 x 24": (convolutions, (4, 32, 24, 24), 1.0),
}


def plain(model: nn.Module, x: Tensor, gradient: Tensor) -> list[float]:
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    torch.autograd.backward(y, gradient)
    return [middle - start, time.perf_counter() - middle]


def ours(model: nn.Module, x: Tensor, gradient: Tensor, parameters: DeferrableParameters) -> list[float]:
    start = time.perf_counter()
    recording = DeferringMode(parameters)
    with recording:
        y = model(x)
    forward = time.perf_counter()
    if recording.candidates:
        recording.learn([y])
    recording.deferred.begin_input()
    torch.autograd.backward(y, gradient)
    inputs = time.perf_counter()
    recording.deferred.run()
    return [forward - start, inputs - forward, time.perf_counter() - inputs]


def torchs(model: nn.Module, x: Tensor, gradient: Tensor) -> list[float]:
    start = time.perf_counter()
    y = model(x)
    forward = time.perf_counter()
    _, groups = stage_backward_input([y], [gradient], [x], model.parameters())
    inputs = time.perf_counter()
    stage_backward_weight(model.parameters(), groups)
    return [forward - start, inputs - forward, time.perf_counter() - inputs]


def measure(make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, data = make(), torch.randn(shape)
    gradient = torch.randn_like(model(data))
    parameters = DeferrableParameters()
    variants: list[Callable[[Tensor], list[float]]] = [
        lambda x: plain(model, x, gradient),
        lambda x: ours(model, x, gradient, parameters),
        lambda x: torchs(model, x, gradient),
    ]
    kept: list[list[list[float]]] = []
    warm_up = 5
    order = random.Random(0)
    for turn in range(rounds + warm_up):
        times: list[list[float]] = [[], [], []]
        for which in order.sample(range(3), 3):
            times[which] = variants[which](data.clone().requires_grad_())
        if turn >= warm_up:
            kept.append(times)
    return summary(kept)


def summary(kept: list[list[list[float]]]) -> dict[str, float]:
    def median(value: Callable[[list[float], list[float], list[float]], float]) -> float:
        return statistics.median(value(*times) for times in kept)

    return {
        "F us": median(lambda p, _o, _t: p[0] * 1e6),
        "B us": median(lambda p, _o, _t: p[1] * 1e6),
        "I us": median(lambda _p, o, _t: o[1] * 1e6),
        "W us": median(lambda _p, o, _t: o[2] * 1e6),
        "I+W/B": median(lambda p, o, _t: (o[1] + o[2]) / p[1]),
        "F'/F": median(lambda p, o, _t: o[0] / p[0]),
        "all": median(lambda p, o, _t: sum(o) / sum(p)),
        "torch I+W/B": median(lambda p, _o, t: (t[1] + t[2]) / p[1]),
        "torch all": median(lambda p, _o, t: sum(t) / sum(p)),
    }


FIGURES = ("F us", "B us", "I us", "W us", "I+W/B", "F'/F", "all", "torch I+W/B", "torch all")


def main() -> None:
    with bench(__doc__, 200) as settings:
        torch.set_num_threads(1)
        columns = [Column(name, 11, "{:.0f}" if name.endswith("us") else "{:.3f}") for name in FIGURES]
        table = settings.report.table(0, "one thread, one microbatch of many", [Column("stage", 32), *columns])
        for name, (make, shape, more) in CASES.items():
            figures = measure(make, shape, int(settings.rounds * more))
            table.row(name, *(figures[column] for column in FIGURES))


if __name__ == "__main__":
    main()
