"""What went wrong in other pipelines when a backward was split, and which computes were never run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from bugs.small import SPLIT, WIDTH, batch, check, linears, pipeline
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.schedule import Op


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_parameter_that_the_input_does_not_reach_gets_its_gradient(schedule: str) -> None:
    """The walk from the input to the weights never met it, and its gradient was None."""

    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.linear = nn.Parameter(torch.ones(WIDTH).double()), nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor, query: Any = None) -> tuple[Tensor, Tensor]:
            return self.linear(x) + (0 if query is None else query), self.query * 1

    pipe = pipeline(
        [Query() for _ in range(4)], schedule, ranks=2, loss_fn=lambda out, y: F.mse_loss(out[0] + out[1], y)
    )
    pipe.step(batch()[0], target=batch()[1])
    assert all(
        stage.query.grad is not None and stage.query.grad.abs().sum() > 0
        for stage in pipe.deployment.ranks.modules().values()
    )


@pytest.mark.parametrize("schedule", SPLIT)
def test_an_output_that_is_a_view_goes_back(schedule: str) -> None:
    """It raised "Can't detach views in-place" for any output made by view, transpose or unsqueeze."""

    class Turn(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).unsqueeze(0).transpose(0, 1).squeeze(1)

    torch.manual_seed(0)
    check(pipeline([Turn(WIDTH, WIDTH).double() for _ in range(4)], schedule, ranks=2))


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_checkpointed_layer_runs_twice_and_not_once_more_for_each_weight(schedule: str) -> None:
    """Sixteen checkpointed layers, of which the first ran 18 times."""
    runs: Counter[int] = Counter()

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(4))

        def _run(self, layer: int, x: Tensor) -> Tensor:
            runs[layer] += 1
            out: Tensor = self.layers[layer](x)
            return out

        def forward(self, x: Tensor) -> Tensor:
            for layer in range(4):
                x = checkpoint(self._run, layer, x, use_reentrant=False)
            return x

    pipe, (x, y) = pipeline([Layers() for _ in range(4)], schedule, ranks=2), batch()
    pipe.step(x, target=y)
    assert runs == dict.fromkeys(range(4), 4 * 4 * 2)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_frozen_first_stage_does_not_take_the_next_ones_gradient_away(schedule: str) -> None:
    """None under the zero-bubble schedules, wrong under DualPipeV, and no word of it."""
    stages = linears()
    stages[0].requires_grad_(False)
    check(pipeline(stages, schedule, ranks=2))


def test_every_compute_of_every_schedule_is_run() -> None:
    """`I` and `W` had no branch in the executor, pairs were dropped, later stages never ran."""
    for schedule in ["gpipe", *SPLIT]:
        pipe, (x, y) = pipeline(schedule=schedule, ranks=2), batch()
        seen: Counter[Any] = Counter()
        for op in (Op.F, Op.B, Op.I, Op.W):
            pipe.register(op, lambda action, context: (seen.update([action]), context.run(action))[1])  # noqa: B023
        pipe.step(x, target=y)
        assert seen == Counter(part for row in pipe.schedule.rows for a in row if a is not None for part in a.parts())
