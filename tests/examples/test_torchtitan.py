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


def trained(name: str, file: str | None = None) -> tuple[list[torch.Tensor], list[float]]:
    """As torchtitan's trainer and validator call it: this rank's gradients, and losses where the last stage is."""
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
        parallelism=SimpleNamespace(pipeline_parallel_schedule=name, pipeline_parallel_schedule_csv=file),
        training=SimpleNamespace(local_batch_size=4),
        device=torch.device("cpu"),
        loss_fn=loss_fn,
    )
    x, y = data()
    found_losses = []
    for run, more in ((schedule.step, {"return_outputs": False}), (schedule.eval, {})):
        losses: list[torch.Tensor] | None = [] if has_last else None
        run(
            arg_mbs=[(row,) for row in x.split(1)] if has_first else None,
            kwarg_mbs=[{} for _ in range(4)],
            target_mbs=list(y.split(1)) if has_last else None,
            losses=losses,
            loss_kwargs={"global_valid_tokens": torch.tensor(24.0)},
            **more,
        )
        found_losses += [] if losses is None else [float(sum(losses))]
    if file is not None:
        assert [str(each) for each in schedule.pipeline_order[0] if each is not None] == ORDER[0].split(",")
    return [each.grad for part in parts for each in part.parameters() if each.grad is not None], found_losses


ORDER = ["0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1,0F2,3F2,3B2,0B2,0F3,3F3,3B3,0B3"]
ORDER += ["1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1,1F2,2F2,2B2,1B2,1F3,2F3,2B3,1B3"]


def trained_in_all_ways(file: str) -> list[Any]:
    return [trained("1F1B"), trained("ZBVZeroBubble"), trained("ZBVZeroBubble", file)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, 6, generator=made, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.slow
def test_the_recipe_trains_torchtitans_stages_as_one_process_would(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("\n".join(ORDER))
    ranks = on_processes(2, trained_in_all_ways, str(file))
    model, (x, y) = nn.Sequential(*layers()), data()
    whole = loss_fn(model(x), y, torch.tensor(24.0))
    whole.backward()  # type: ignore[no-untyped-call]
    every = [[each.grad for each in layer.parameters()] for layer in model]
    for way, order in enumerate([[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 3], [1, 2]]]):
        for numbers, found in zip(order, ranks, strict=True):
            gradients, losses = found[way]
            torch.testing.assert_close(gradients, [grad for number in numbers for grad in every[number]])
            assert losses == ([pytest.approx(whole.item(), rel=1e-12)] * 2 if 3 in numbers else [])
