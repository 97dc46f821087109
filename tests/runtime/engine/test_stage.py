"""What a stage may be: frozen, tied, hooked, checkpointed, with outputs that are views and weights off the path.

Each is compared with the plain loop under a schedule of full backwards and under ones that split them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from runtime.engine.small import SCHEDULES, WIDTH, Small, check
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PeerFailure

FROZEN = [[0], [1], [3], [0, 1], [0, 2, 3]]


@pytest.mark.parametrize(
    ("schedule", "frozen"),
    by_turns(SCHEDULES, FROZEN, fast=[(s, FROZEN[row % len(FROZEN)]) for row, s in enumerate(SCHEDULES)]),
)
def test_frozen_stages(schedule: str, frozen: list[int]) -> None:
    def make() -> list[nn.Module]:
        stages: list[nn.Module] = [Small() for _ in range(4)]
        for number in frozen:
            stages[number].requires_grad_(False)
        return stages

    pipe = check(schedule, make)
    trained = {name.split(".")[0] for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    assert trained == {str(number) for number in range(4) if number not in frozen}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frozen_parameters_here_and_there(schedule: str) -> None:
    def make() -> list[nn.Module]:
        stages: list[Any] = [Small() for _ in range(4)]
        stages[0].linear.weight.requires_grad_(False)
        stages[1].linear.bias.requires_grad_(False)
        stages[2].norm.requires_grad_(False)
        stages[3].linear.requires_grad_(False)
        return stages

    check(schedule, make)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_that_are_views_of_what_was_computed_or_of_the_input(schedule: str) -> None:
    class View(nn.Module):
        def __init__(self, kind: int) -> None:
            super().__init__()
            self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

        def forward(self, x: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
            x = x.reshape(-1, WIDTH)
            out = self.linear(x if seen is None else x + seen.reshape(-1, WIDTH))
            views = (out.view(2, -1, 3), out.t().contiguous().t(), out.unsqueeze(0), out.chunk(1)[0])
            return views[self.kind], x.view_as(x)

    def loss(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(output[0].reshape(-1, WIDTH), y) + output[1].pow(2).mean()

    check(schedule, lambda: [View(kind) for kind in range(4)], loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_that_the_stages_input_does_not_reach(schedule: str) -> None:
    class Query(nn.Module):
        """Its query goes out beside its output and never meets its input."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.make, self.linear = (
                nn.Parameter(torch.randn(1, WIDTH)),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.unused = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor, query: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.linear(x if query is None else x * query)), self.make(self.query) + 0

    check(schedule, lambda: [Query() for _ in range(4)], lambda out, y: F.mse_loss(out[0] + out[1], y))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_tied_inside_a_stage_and_tensors_used_twice(schedule: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            x = x + torch.tanh(self.one(x)) * x
            return self.other(x) + F.linear(x, self.one.weight.t())

    check(schedule, lambda: [Tied() for _ in range(4)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_some_values_that_cross_have_no_gradient_and_some_gradients_never_come(schedule: str) -> None:
    class Partly(nn.Module):
        """The second output is used by nobody, the third needs no gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, unused: Any = None, ids: Any = None, nothing: Any = None) -> tuple[Any, ...]:
            assert nothing is None
            return torch.tanh(self.linear(x)), self.extra(x), torch.arange(len(x)), None

    check(schedule, lambda: [Partly() for _ in range(4)], lambda out, y: F.mse_loss(out[0], y))


class Checkpointed(nn.Module):
    runs: ClassVar[Counter[int]] = Counter()

    def __init__(self, number: int, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.number, self.reentrant = Small(), number, reentrant

    def _counted(self, x: Tensor) -> Tensor:
        self.runs[self.number] += 1
        out: Tensor = self.inner(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._counted, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_checkpointed_layers_run_exactly_twice(schedule: str) -> None:
    Checkpointed.runs.clear()
    torch.manual_seed(0)
    stages = [Checkpointed(number, reentrant=False) for number in range(4)]
    pipe = penstock.Pipeline(stages, microbatches=4, schedule=schedule, ranks=2, loss_fn=F.mse_loss)
    x = torch.randn(8, WIDTH)
    pipe.step(x, target=x)
    assert Checkpointed.runs == dict.fromkeys(range(4), 8)
    check(schedule, lambda: [Checkpointed(number, reentrant=False) for number in range(4)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reentrant_checkpoints_work_too(schedule: str) -> None:
    # the first stage's input has no gradient, with which such a checkpoint has none either: so it is not used there
    check(schedule, lambda: [Small(), *(Checkpointed(number, reentrant=True) for number in range(3))])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_on_parameters_fire_once_for_each_microbatch_and_on_complete_gradients_once(schedule: str) -> None:
    torch.manual_seed(0)
    stages = [Small() for _ in range(4)]
    pipe = penstock.Pipeline(stages, microbatches=4, schedule=schedule, ranks=2, loss_fn=F.mse_loss)
    after: Counter[str] = Counter()
    before: Counter[str] = Counter()
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: after.update([name]))
        parameter.register_hook(lambda _, name=name: before.update([name]))
    x = torch.randn(8, WIDTH)
    for step in range(1, 3):
        pipe.step(x, target=x)
        names = [name for name, _ in pipe.named_parameters()]
        assert after == dict.fromkeys(names, step)
        assert before == dict.fromkeys(names, 4 * step)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_on_modules_fire_and_may_change_what_passes(schedule: str) -> None:
    calls: Counter[str] = Counter()

    def make() -> list[nn.Module]:
        stages = [Small() for _ in range(4)]
        for stage in stages:
            stage.linear.register_forward_hook(lambda *given: given[2] * 2)
            stage.register_forward_pre_hook(lambda *_: calls.update("f"))
        for stage in stages[1:]:  # torch warns where the module's input has no gradient
            stage.linear.register_full_backward_hook(lambda _, grads, __: calls.update("b") or (grads[0] * 0.5,))
        return stages

    check(schedule, make)
    assert calls == {"f": 2 * 2 * 16, "b": 2 * 2 * 12}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_value_with_three_readers_adds_their_gradients_in_the_order_of_a_plain_loop(schedule: str) -> None:
    class Gives(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            value = torch.tanh(super().forward(x))
            return penstock.Routed(value, {2: value, 3: value})

    class Takes(nn.Linear):
        def forward(self, x: Tensor, early: Tensor | None = None) -> Tensor:
            return super().forward(x) if early is None else super().forward(x) * early

    torch.manual_seed(0)
    stages = [kind(WIDTH, WIDTH).bfloat16() for kind in (Gives, Takes, Takes, Takes)]
    x, y = torch.randn(2, 8, WIDTH).bfloat16().unbind()
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        given = stages[0](a)
        value = stages[3](stages[2](stages[1](given.output), given.to[2]), given.to[3])
        (F.mse_loss(value, b) / 4).backward()
    wanted = [parameter.grad for stage in stages for parameter in stage.parameters()]
    for stage in stages:
        stage.zero_grad()
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "cut_options": penstock.CutOptions(skips=((0, 2), (0, 3)))}
    with penstock.Pipeline(list(stages), microbatches=4, schedule=schedule, **options) as pipe:
        pipe.step(x, target=y)
    assert all(map(torch.equal, [parameter.grad for stage in stages for parameter in stage.parameters()], wanted))


def test_a_stage_that_sends_elsewhere_than_declared_is_an_error() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return penstock.Routed(self.linear(x), {2: x})

    stages = [Wrong(), *(Small() for _ in range(3))]
    x = torch.randn(4, WIDTH)
    for skips in ([], [(0, 3)]):
        pipe = penstock.Pipeline(
            stages, microbatches=2, cut_options=penstock.CutOptions(skips=skips), loss_fn=F.mse_loss
        )
        with pytest.raises(PeerFailure, match=r"stage 0 sends to stages \[2\] beside the next one, but"):
            pipe.step(x, target=x)
