"""What checking a loss costs in a step: with it and without, against torch.distributed.pipelining and one process.

    penstock bench losses [--quick] [--json] [--rounds 9]

Two gloo processes with one thread each, 1f1b. Stages of little compute and a target as large as what travels, so that
whatever looked at the batch would show; and stages of next to nothing, where a microsecond shows. `mse` is torch's own,
which needs no check; `own` is a lambda of the user's, whose graph is read at each microbatch, and which is called for a
pair of microbatches now and then; `terms` is another, with three terms.

A contestant's turn is as many steps as it takes for one pair to have its turn. Without the check is
`LossOptions(per_microbatch=True)`. `check %` is the processor time that the check takes of the rank of the last stage,
from both within one round; `checked/plain` is against a plain loop in *one* process.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import Step, Times, interleave, only, run_ranks, torch_pipeline
from report import Column, Goal, bench
from throughput import Scale
from torch import Tensor

import penstock
from penstock.runtime.loss.check import APART

Loss = Callable[[Tensor, Tensor], Tensor]


def terms(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output, target) + 0.1 * output.square().mean() - 0.01 * (output * target).mean()


LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "own": lambda output, target: (output - target).square().mean(),
    "terms": terms,
}


def plain_loop(model: torch.nn.Module, x: Tensor, y: Tensor, count: int, loss_fn: Loss) -> None:
    seed = torch.tensor(1 / count)
    for x_part, y_part in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        torch.autograd.backward(loss_fn(model(x_part), y_part), seed)


def contestants(
    rank: int, name: str, count: int, rows: int, width: int
) -> tuple[dict[str, Step], list[penstock.Pipeline]]:
    """One turn of each."""
    torch.manual_seed(0)
    turns, loss_fn = max(1, APART // count), LOSSES[name]
    x, y = torch.randn(2, rows * count, width).unbind()

    def make() -> list[torch.nn.Module]:
        return [Scale(width) for _ in range(2)]

    def pipeline(options: penstock.LossOptions) -> penstock.Pipeline:
        return penstock.Pipeline(make(), microbatches=count, loss_fn=loss_fn, loss_options=options)

    options = {"checked": penstock.LossOptions(), "unchecked": penstock.LossOptions(per_microbatch=True)}
    pipes = {who: pipeline(each) for who, each in options.items()}
    one, theirs = torch.nn.Sequential(*make()), torch_pipeline("1f1b", rank, make(), count, loss_fn, x, y)
    steps: dict[str, Step] = {who: lambda pipe=pipe: pipe.step(x, target=y) for who, pipe in pipes.items()}
    steps["torch"] = theirs
    steps["plain"] = only(rank, 0, lambda: plain_loop(one, x, y, count, loss_fn))
    return {who: repeated(step, turns) for who, step in steps.items()}, list(pipes.values())


def repeated(step: Step, times: int) -> Step:
    def turn() -> None:
        for _ in range(times):
            step()

    return turn


def share_of_check(times: Times, of: str) -> float:
    """Return the median over the rounds of what the check adds, in percent of the checked step."""
    seconds = times.seconds if of == "wall" else times.busy
    both = zip(seconds["checked"], seconds["unchecked"], strict=True)
    return statistics.median(100 * (1 - without / checked) for checked, without in both)


def measure(rank: int, settings: Namespace) -> None:
    columns = [Column("loss", 8), Column("microbatches", 12), Column("MiB", 8, "{:.2g}"), Column("ms", 8, "{:.2f}")]
    columns += [Column("check %", 21, "{:.1f}"), Column("check %, busy", 8, "{:.1f}", "busy")]
    columns += [Column("checked/torch", 21, "{:.2f}"), Column("checked/plain", 9, "{:.2f}")]
    table = settings.report.table(rank, "2 gloo ranks, 1f1b: a step with the check of its loss", columns)
    sizes = [(16, 2, 8)] if settings.quick else [(16, 128, 4096), (16, 32, 1024), (64, 4, 8)]
    for count, rows, width in sizes:
        for name in LOSSES:
            steps, pipes = contestants(rank, name, count, rows, width)
            times = interleave(steps, settings.rounds, warm_up=1)
            for pipe in pipes:
                pipe.close()
            step = times.median("checked") / max(1, APART // count) * 1e3
            shares = share_of_check(times, "wall"), share_of_check(times, "busy")
            ratios = times.ratio("checked", "torch"), times.ratio("checked", "plain")
            goal = Goal(ratios[0], 1.0)
            table.row(name, count, rows * width * 4 / 2**20, step, shares[0], shares[1], goal, ratios[1])


def main() -> None:
    with bench(__doc__, 9) as settings:
        run_ranks(measure, 2, settings)


if __name__ == "__main__":
    main()
