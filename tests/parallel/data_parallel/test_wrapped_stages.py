"""Stages that were wrapped before they came here, in schedules that split the backward: reduced once, at the end.

Two pipelines of two ranks each train on batches of their own, as replicas. The gradients, and after two steps of an
optimizer the parameters, are those of one plain model on both batches.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.compat.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from penstock.errors import PeerFailure, UsageError

WIDTH, MICROBATCHES, ROWS = 8, 4, 8


class Block(nn.Module):
    """A norm, whose parameters cannot wait for W, between two layers whose can; and a bias that its input shares."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("no such luck")
        out: Tensor = self.second(torch.relu(self.norm(self.first(x)))) + x + self.bias
        return out


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).double()


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    some = torch.Generator().manual_seed(10 * step + replica)
    return tuple(torch.randn(ROWS, WIDTH, generator=some, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def plain(count: int, steps: int) -> nn.Sequential:
    """Both replicas' batches on one model."""
    model = blocks(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        for replica in range(2):
            x, y = batch(replica, step)
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def wrap(kind: str, block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(block, process_group=mesh.get_group())
    if kind == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(block, mesh=mesh)
    from torch.distributed.fsdp import fully_shard

    for inner in (block.first, block.second):  # type: ignore[attr-defined]
        if kind == "nested":
            fully_shard(inner, mesh=mesh, reshard_after_forward=True)  # type: ignore[arg-type]
    return fully_shard(block, mesh=mesh)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


PLACED: dict[Any, Any] = {
    Schedule1F1B: lambda rank: [rank],
    ScheduleInterleaved1F1B: lambda rank: [rank, rank + 2],
    ScheduleInterleavedZeroBubble: lambda rank: [rank, rank + 2],
    ScheduleZBVZeroBubble: lambda rank: [rank, 3 - rank],
    ScheduleDualPipeV: lambda rank: [rank, 3 - rank],
}


def trained(kind: str, schedule_class: Any, mesh: DeviceMesh) -> None:
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    indices = PLACED[schedule_class](rank)
    count = 2 * len(indices)
    whole = blocks(count)
    parts = {index: wrap(kind, copy.deepcopy(whole[index]), mesh["dp"]) for index in indices}
    group = mesh["pp"].get_group()
    stages = [PipelineStage(part, index, count, torch.device("cpu"), group=group) for index, part in parts.items()]
    schedule = schedule_class(stages if count > 2 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW([each for part in parts.values() for each in part.parameters()], lr=0.01)
    for step in range(2):
        x, y = batch(replica, step)
        losses: list[Any] = []
        given = {"target": y, "losses": losses} if count - 1 in indices else {}
        schedule.step(*((x,) if rank == 0 else ()), **given)
        if losses and step == 0:
            wanted = nn.functional.mse_loss(whole(x), y)
            torch.testing.assert_close(torch.stack(losses).mean(), wanted.detach())  # of this replica's own batch
        if step == 0:
            assert schedule.pipeline.clip_grad_norm_(1e9) > 0
        optimizer.step()
        optimizer.zero_grad()
    final = plain(count, 2)
    for index, part in parts.items():
        for name, parameter in part.named_parameters():
            wanted = final[index].get_parameter(name.removeprefix("module."))
            torch.testing.assert_close(full(parameter.detach()), wanted.detach(), msg=f"{kind} {schedule_class} {name}")
    schedule.eval(*((x,) if rank == 0 else ()))
    assert not any(isinstance(each, torch.nn.Parameter) and each.grad is not None for each in part.parameters())
    schedule.close()


CASES: dict[str, list[Any]] = {
    "fsdp": [Schedule1F1B, ScheduleZBVZeroBubble],
    "nested": [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleDualPipeV],
    "replicate": [ScheduleZBVZeroBubble],
    "ddp": [Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleDualPipeV],
}


def on_four() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    for kind, classes in CASES.items():
        for schedule_class in classes:
            trained(kind, schedule_class, mesh)


@pytest.mark.slow
def test_a_wrapped_stage_is_reduced_after_its_last_weights() -> None:
    on_processes(4, on_four)


# -- two replicas, each with both of its stages in one process


def pipeline(kind: str, mesh: DeviceMesh) -> tuple[Any, list[nn.Module]]:
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    parts = [wrap(kind, block, mesh) for block in copy.deepcopy(blocks(2))]
    stages = [PipelineStage(part, index, 2, torch.device("cpu"), group=own) for index, part in enumerate(parts)]
    return ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss), parts


def gradients(parts: list[nn.Module]) -> list[Tensor]:
    return [full(each.grad) for part in parts for each in part.parameters() if each.grad is not None]


def expected(steps: int) -> list[Tensor]:
    model = blocks(2)
    for step in range(steps):
        for replica in range(2):
            x, y = batch(replica, step)
            (nn.functional.mse_loss(model(x), y) / 2).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


def counted(kind: str, mesh: DeviceMesh) -> int:
    """How many reductions one step has."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as inside

    schedule, parts = pipeline(kind, mesh)
    seen: list[int] = []
    if kind == "ddp":
        for part in parts:
            part.register_comm_hook(None, lambda state, bucket: seen.append(1) or allreduce_hook(None, bucket))  # type: ignore[operator, func-returns-value]
    original = inside.foreach_reduce
    inside.foreach_reduce = lambda *args, **kwargs: seen.append(1) or original(*args, **kwargs)  # type: ignore[func-returns-value]
    try:
        schedule.step(batch(dist.get_rank(), 0)[0], target=batch(dist.get_rank(), 0)[1])
    finally:
        inside.foreach_reduce = original
    torch.testing.assert_close(gradients(parts), expected(1))
    return len(seen)


def fails_and_accumulates(kind: str, mesh: DeviceMesh) -> None:
    """A step that fails leaves nothing behind; then one without synchronisation, and one with."""
    schedule, parts = pipeline(kind, mesh)
    replica = dist.get_rank()
    inner: list[Any] = [part.module if kind == "ddp" else part for part in parts]
    inner[1].broken = True
    with pytest.raises(PeerFailure, match="no such luck"):
        schedule.step(batch(replica, 3)[0], target=batch(replica, 3)[1])
    inner[1].broken = False
    for part in parts if kind != "ddp" else ():
        part.set_requires_gradient_sync(False)  # type: ignore[operator]
    with ExitStack() as stack:
        for part in parts if kind == "ddp" else ():
            stack.enter_context(part.no_sync())  # type: ignore[operator]
        schedule.step(batch(replica, 0)[0], target=batch(replica, 0)[1])
    for part in parts if kind != "ddp" else ():
        part.set_requires_gradient_sync(True)  # type: ignore[operator]
    schedule.step(batch(replica, 1)[0], target=batch(replica, 1)[1])
    torch.testing.assert_close(gradients(parts), expected(2))
    state = schedule.pipeline.full_state_dict()
    torch.testing.assert_close([full(each) for part in inner for each in part.parameters()], list(state.values()))


def refusals(mesh: DeviceMesh) -> list[str]:
    """Two ranks as threads of one process, and a pipeline that shall shard what is sharded."""
    import penstock

    found = []
    for given in (
        {"ranks": 2, "transport": "threads"},
        {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))},
    ):
        parts = [wrap("fsdp", block, mesh) for block in blocks(2)]
        with pytest.raises(UsageError) as caught:
            penstock.Pipeline(parts, microbatches=2, loss_fn=nn.functional.mse_loss, **given)
        found.append(str(caught.value))
    return found


def on_two() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    counts = {kind: counted(kind, mesh) for kind in ("fsdp", "nested", "replicate", "ddp")}
    for kind in ("nested", "ddp"):
        fails_and_accumulates(kind, mesh)
    return {"counts": counts, "refused": refusals(mesh)}


@pytest.mark.slow
def test_each_group_of_parameters_is_reduced_once_per_step() -> None:
    for found in on_processes(2, on_two):
        assert found["counts"] == {"fsdp": 2, "nested": 6, "replicate": 2, "ddp": 2}  # groups, in two stages
        threads, twice = found["refused"]
        assert "2 ranks share this process" in threads
        assert "stage 0 is wrapped in fully_shard, and ParallelOptions or the mesh's axis 'dp'" in twice
