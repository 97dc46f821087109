"""A pipeline with replicas: the step of pp=2 x dp=2, against torch.distributed.pipelining with DDP or FSDP2.

    penstock bench composition [--quick] [--json] [--rounds 7] [--schedules 1f1b,zb-v] [--kinds ddp,fsdp]

Four gloo processes, one thread each. 8 transformer blocks (width 256, 64 tokens, 8 microbatches of 2 rows a replica),
against torch.distributed.pipelining with the same replication: DistributedDataParallel around each stage, or
`fully_shard` on it. Ours as it comes (stages pass activations through shared memory on one host; replicas reduce over
gloo), and held to gloo. torch's DistributedDataParallel ends in an internal assertion of its own in the second step of
every schedule here but 1f1b: there it does not take part.

`agree` says whether all replicas had the same gradients after a step, which is what replication is for: "no" is a
contestant that skipped the reduction, and its time is not one of the same work. `busy` is the ratio of processor time
(see `common.Times`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SEVERAL, THEIRS, WAYS, Block, Step, V, interleave, run_ranks, without_ours
from report import Column, Goal, Table, add_names, bench
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock.schedule import Placement

FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")
KINDS = ("ddp", "fsdp")


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def blocks(family: str, quick: bool, width: int) -> list[nn.Module]:
    stages = 4 if family in SEVERAL else 2
    each = 1 if quick else 8 // stages
    torch.manual_seed(0)
    return [nn.Sequential(*[Block(width, 4) for _ in range(each)]) for _ in range(stages)]


def torch_replicas(
    family: str, kind: str, mesh: Any, modules: Sequence[nn.Module], count: int, x: Tensor, y: Tensor
) -> tuple[Step, list[nn.Module]]:
    """A step of torch's pipelining with torch's replication, and the modules that it trains."""
    rank, stages = mesh.get_local_rank("pp"), len(modules)
    placement = Placement.v(2) if family in V else Placement.loop(2, stages // 2)
    mine = placement.stages_of(rank)
    wrapped: list[Any] = []
    for stage in mine:
        if kind == "ddp":
            wrapped.append(DistributedDataParallel(modules[stage], process_group=mesh.get_group("dp")))
        else:
            wrapped.append(fully_shard(modules[stage], mesh=mesh["dp"]))
    device, group = torch.device("cpu"), mesh.get_group("pp")
    parts = [
        theirs.PipelineStage(module, stage, stages, device, group=group)
        for module, stage in zip(wrapped, mine, strict=True)
    ]
    single = not issubclass(THEIRS[family], theirs.schedules.PipelineScheduleMulti)
    schedule = THEIRS[family](parts[0] if single else parts, count, mean_loss)
    args = (x,) if 0 in mine else ()
    target = {"target": y} if stages - 1 in mine else {}

    def step() -> None:
        losses: list[Tensor] = []
        schedule.step(*args, **target, losses=losses if target else None, return_outputs=False)

    return step, [modules[stage] for stage in mine]


def agree(parameters: Sequence[nn.Parameter], mesh: Any) -> bool:
    """Whether all replicas have the same gradients, on every rank; parts of one gradient always do."""
    same = True
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or hasattr(gradient, "full_tensor"):
            same = same and gradient is not None
            continue
        parts = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(parts, gradient.contiguous(), group=mesh.get_group("dp"))
        same = same and torch.allclose(*parts, rtol=1e-4, atol=1e-7)
    told = torch.tensor([float(same)])
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def measure(rank: int, settings: Namespace) -> None:
    quick = settings.quick
    width, tokens, count = (32, 8, 4) if quick else (256, 64, 8)
    mesh = penstock.mesh(pp=2, dp=2)
    columns = [Column("schedule", 17), Column("replicas", 8), Column("who", 10), Column("ms", 8)]
    columns += [Column("it/torch", 21), Column("it/torch, busy", 4, "{:.2f}", "busy"), Column("agree", 5)]
    title = f"pp=2 x dp=2: transformer blocks, width {width}, {tokens} tokens, {count} microbatches"
    table = settings.report.table(rank, title, columns)
    for family in settings.schedules:
        for kind in settings.kinds:
            one_case(table, mesh, family, kind, (width, tokens, count), settings)


def one_case(table: Table, mesh: Any, family: str, kind: str, sizes: tuple[int, int, int], settings: Namespace) -> None:
    width, tokens, count = sizes
    made = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    x, y = torch.randn(2, 2 * count, tokens, width, generator=made).unbind()
    common = {
        "microbatches": count,
        "schedule": family,
        "loss_fn": mean_loss,
        "mesh": mesh,
        "parallel_options": penstock.ParallelOptions(replicate=kind),
    }
    pipes = {
        who: penstock.Pipeline(blocks(family, settings.quick, width), **common, transport=way)
        for who, way in WAYS.items()
    }
    owned: dict[str, list[nn.Parameter]] = {who: list(pipe.parameters()) for who, pipe in pipes.items()}

    def cleared(step: Step, parameters: list[nn.Parameter]) -> Step:
        def run() -> None:
            for parameter in parameters:
                parameter.grad = None
            step()

        return run

    steps: dict[str, Step] = {
        who: cleared(lambda pipe=pipe: pipe.step(x, target=y), owned[who]) for who, pipe in pipes.items()
    }
    if kind != "ddp" or family == "1f1b":
        modules = blocks(family, settings.quick, width)
        torch_step, trained = torch_replicas(family, kind, mesh, modules, count, x, y)
        owned["torch"] = [parameter for module in trained for parameter in module.parameters()]
        steps["torch"] = without_ours(cleared(torch_step, owned["torch"]))
    times = interleave(steps, settings.rounds)
    for who in steps:
        same = "yes" if agree(owned[who], mesh) else "no"
        if who == "torch" or "torch" not in steps:
            table.row(family, kind, who, times.median(who) * 1e3, None, None, same)
        else:
            against = Goal(times.ratio(who, "torch"), 1.0)
            table.row(family, kind, who, times.median(who) * 1e3, against, times.busy_ratio(who, "torch"), same)
    for pipe in pipes.values():
        pipe.close()


def main() -> None:
    with bench(__doc__, 7, tuple(THEIRS), FAMILIES, lambda parser: add_names(parser, "--kinds", KINDS)) as settings:
        run_ranks(measure, 4, settings)


if __name__ == "__main__":
    main()
