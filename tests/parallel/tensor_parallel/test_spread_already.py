"""Stages that were spread over ranks before they came here (`parallelize_module`): DTensors cross their boundaries.

Two pipelines of two ranks share each stage's tensors. After two steps of an optimizer all parameters are those of one
plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock
from penstock.compat.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from penstock.errors import UsageError

WIDTH, ROWS, MICROBATCHES = 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Gathered(nn.Linear):
    """Has nothing that is spread, and takes what is."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x.full_tensor() if hasattr(x, "full_tensor") else x)


def blocks(count: int, gathers: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Block() for _ in range(count)]
    return nn.Sequential(*layers[: count - gathers], *[Gathered(WIDTH, WIDTH)] * gathers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    some = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=some, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def plain(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def spread(block: nn.Module, mesh: DeviceMesh, output: Any) -> nn.Module:
    """Megatron's way, and the output stays a DTensor: replicated, along the rows, or as summands."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if not isinstance(block, Block):
        return block
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=output, use_local_output=False)}
    return parallelize_module(block, mesh, styles)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check(parts: dict[int, nn.Module], wanted: nn.Sequential) -> None:
    for index, part in parts.items():
        for name, parameter in part.named_parameters():
            torch.testing.assert_close(
                full(parameter.detach()), wanted[index].get_parameter(name).detach(), msg=f"{index}.{name}"
            )


def loss_of(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(full(output), target)


def trained(schedule_class: Any, mesh: DeviceMesh, output: Any, gathers: bool = False, inputs: Any = None) -> int:

    rank = mesh["pp"].get_local_rank()
    indices = {Schedule1F1B: [rank], ScheduleInterleavedZeroBubble: [rank, rank + 2]}.get(
        schedule_class, [rank, 3 - rank]
    )
    count, asked = 2 * len(indices), []
    whole = blocks(count, gathers)
    parts = {index: spread(copy.deepcopy(whole[index]), mesh["tp"], output) for index in indices}

    def get_mesh(names: tuple[str, ...], layout: Any) -> DeviceMesh:
        asked.append(names)
        assert layout == mesh[names]._layout
        return mesh[names]

    stages = [
        PipelineStage(part, index, count, torch.device("cpu"), group=mesh["pp"].get_group(), get_mesh=get_mesh)
        for index, part in parts.items()
    ]
    schedule = schedule_class(stages if count > 2 else stages[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(
        [each for part in parts.values() for each in part.parameters()], lr=0.01, foreach=False
    )
    for step in range(2):
        x, y = batch(step)
        losses: list[Any] = []
        result = schedule.step(
            *((x,) if rank == 0 else ()), **({"target": y, "losses": losses} if count - 1 in indices else {})
        )
        if count - 1 in indices:
            assert len(losses) == MICROBATCHES
            if step == 0:
                torch.testing.assert_close(full(result), whole(x).detach())
            assert hasattr(result, "full_tensor") != gathers  # as the stage returned it
        optimizer.step()
        optimizer.zero_grad()
    check(parts, plain(blocks(count, gathers)))  # type: ignore[arg-type]
    schedule.close()
    return len(asked)


def by_mesh() -> list[str]:
    """`Pipeline(mesh=)` with an axis tp, and no plan for it: the modules are spread already."""
    from torch.distributed.tensor import Replicate

    mesh = penstock.mesh(pp=2, tp=2)
    parts = [spread(block, mesh["tp"], Replicate()) for block in blocks(2)]
    pipe = penstock.Pipeline(parts, microbatches=MICROBATCHES, schedule="zb-h1", loss_fn=loss_of, mesh=mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, foreach=False)
    norms = []
    for step in range(2):
        x, y = batch(step)
        pipe.step(x, target=y)
        norms.append(float(pipe.clip_grad_norm_(1e9)))
        optimizer.step()
        optimizer.zero_grad()
    check({pipe.rank: parts[pipe.rank]}, plain(blocks(2)))  # type: ignore[arg-type]
    model = blocks(2)
    nn.functional.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    assert norms[0] == pytest.approx(float(nn.utils.get_total_norm([each.grad for each in model.parameters()])))  # type: ignore[misc]
    refused = []
    for modules in (list(blocks(2)), [spread(block, mesh["pp"], Replicate()) for block in blocks(2)]):
        with pytest.raises(UsageError) as caught:
            penstock.Pipeline(modules, microbatches=2, loss_fn=loss_of, mesh=mesh)
        refused.append(str(caught.value))
    return refused


def on_four() -> dict[str, Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    asked = [trained(Schedule1F1B, mesh, Shard(0))]
    asked.append(trained(ScheduleZBVZeroBubble, mesh, Partial()))
    asked.append(trained(ScheduleInterleavedZeroBubble, mesh, Replicate()))
    asked.append(trained(Schedule1F1B, mesh, Shard(1), gathers=True))
    for inputs in (Replicate(), Shard(0), Shard(1)):
        trained(Schedule1F1B, mesh, Replicate(), inputs=inputs)
    return {"asked": asked, "refused": by_mesh(), "rank": mesh["pp"].get_local_rank()}


@pytest.mark.slow
def test_stages_that_are_spread_already_train_and_dtensors_cross() -> None:
    for found in on_processes(4, on_four):
        # a stage whose own parameters are spread knows its mesh; the last one, with nothing spread, asks once
        assert found["asked"] == [0, 0, 0, found["rank"]]
        plain_modules, other_axis = found["refused"]
        assert "no module is spread already, by parallelize_module() say" in plain_modules
        assert "spread or sharded already" in other_axis
        assert "not over the mesh's axis 'tp'" in other_axis
