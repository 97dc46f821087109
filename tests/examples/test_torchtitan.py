"""The recipe for torchtitan, without torchtitan: what its `pipeline_llm` returns is made of torch's own parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

RECIPE = Path(__file__).resolve().parents[2] / "examples/torchtitan/penstock_pipelining.py"


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(4)]


def loss_fn(output: torch.Tensor, target: torch.Tensor, global_valid_tokens: torch.Tensor) -> Any:
    return ((output - target) ** 2).sum() / global_valid_tokens


def pipeline_llm(model: Any, *, parallelism: Any, training: Any, device: Any, loss_fn: Any) -> Any:
    """torch's stages and schedule over the layers, as torchtitan makes them."""
    kind = get_schedule_class(parallelism.pipeline_parallel_schedule)
    rank, is_single = dist.get_rank(), issubclass(kind, PipelineScheduleSingle)
    numbers = [rank] if is_single else [rank, 3 - rank]
    size = len(model) // (2 if is_single else 4)
    parts = [nn.Sequential(*model[number * size : (number + 1) * size]) for number in numbers]
    count = len(model) // size
    stages = [PipelineStage(part, number, count, device) for part, number in zip(parts, numbers, strict=True)]
    schedule = kind(stages[0] if is_single else stages, n_microbatches=4, loss_fn=loss_fn, scale_grads=False)
    return schedule, parts, 0 in numbers, count - 1 in numbers


def trained(name: str) -> tuple[list[torch.Tensor], float | None]:
    """One step as torchtitan's trainer calls it: this rank's gradients, and the loss where the last stage is."""
    found = ModuleType("torchtitan.distributed.pipeline_parallel")
    found.pipeline_llm = pipeline_llm  # type: ignore[attr-defined]
    sys.modules.update({"torchtitan": ModuleType("torchtitan"), "torchtitan.distributed": ModuleType("distributed")})
    sys.modules["torchtitan.distributed.pipeline_parallel"] = found
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    schedule, parts, has_first, has_last = recipe.penstock_pipeline(
        layers(),
        parallelism=SimpleNamespace(pipeline_parallel_schedule=name, pipeline_parallel_microbatch_size=1),
        training=SimpleNamespace(local_batch_size=4),
        device=torch.device("cpu"),
        loss_fn=loss_fn,
    )
    x, y = data()
    losses: list[torch.Tensor] | None = [] if has_last else None
    schedule.step(
        arg_mbs=[(row,) for row in x.split(1)] if has_first else None,
        kwarg_mbs=[{} for _ in range(4)],
        target_mbs=list(y.split(1)) if has_last else None,
        losses=losses,
        loss_kwargs={"global_valid_tokens": torch.tensor(24.0)},
        return_outputs=False,
    )
    gradients = [each.grad for part in parts for each in part.parameters() if each.grad is not None]
    return gradients, None if losses is None else float(sum(losses))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 6, generator=made, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_the_recipe_trains_torchtitans_stages_as_one_process_would(name: str) -> None:
    ranks = on_processes(2, trained, name)
    model, (x, y) = nn.Sequential(*layers()), data()
    whole = loss_fn(model(x), y, torch.tensor(24.0))
    whole.backward()  # type: ignore[no-untyped-call]
    every = [[each.grad for each in layer.parameters()] for layer in model]
    order = [[0, 1], [2, 3]] if name == "1F1B" else [[0, 3], [1, 2]]
    for numbers, (gradients, loss) in zip(order, ranks, strict=True):
        torch.testing.assert_close(gradients, [grad for number in numbers for grad in every[number]])
        assert loss is None or loss == pytest.approx(whole.item(), rel=1e-12)
