"""`penstock.parity`: exact where the pipeline is, and a finger on the first wrong tensor where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import CutOptions
from penstock.errors import ParityError
from penstock.runtime.engine.stage import Stage, StageInput
from penstock.runtime.loss.shares import BatchShares
from penstock.runtime.state.randomness import StepCounter
from penstock.schedule import FAMILIES
from penstock.schedule.builders import TRAINING
from penstock.tools.parity_check.parity import Parity
from penstock.tools.parity_check.tensor_trace import check_close

WIDTH, ROWS, M = 6, 10, 4  # ragged: 3, 3, 2 and 2 rows


class Noisy(nn.Module):
    """Dropout, running statistics, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        made: Tensor = self.drop(self.norm(torch.tanh(self.linear(x)))) * scale
        penstock.add_loss("size", made.square().mean())
        return made


def noisy(stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Noisy() for _ in range(stages)]


def check(model: Any = None, tolerance: float | None = None, **options: Any) -> Parity:
    torch.manual_seed(2)
    options = {"microbatches": M, "loss_fn": F.mse_loss, "seed": 7, "ranks": 2, **options}
    kwargs = {"scale": 0.5} if model is None else {}
    return penstock.parity(
        model or noisy(2 * FAMILIES[options.get("schedule", "1f1b")].stages_per_rank),
        torch.randn(ROWS, WIDTH),
        target=torch.randn(ROWS, WIDTH),
        tolerance=tolerance,
        pipeline=options,
        **kwargs,
    )


WAYS = ("never", "except_last", "always")
FEW = [(family, WAYS[row % 3]) for row, family in enumerate(TRAINING)]  # each family once, and each way


@pytest.mark.parametrize(("family", "recompute"), by_turns(TRAINING, WAYS, fast=FEW[::2]))
def test_a_pipeline_is_exact_with_dropout_buffers_extra_losses_and_keywords(family: str, recompute: str) -> None:
    found = check(schedule=family, recompute=recompute)
    assert found.output == found.loss == found.buffer == 0.0
    assert found.exact or (family == "looped-bfs" and found.gradient < 1e-5)
    stages = 2 * FAMILIES[family].stages_per_rank
    outputs, extra, buffers, gradients = stages * M, stages * M, 3 * stages * M, 4 * stages * M
    at_the_end = 3 * stages + 4 * stages + 1
    assert found.compared == 2 * (outputs + extra + buffers + gradients + M + at_the_end)


def test_it_takes_a_sequential_with_a_cut_and_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check(model, stages=2, balance=[2, 3]).exact
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_may_bring_its_own_loss() -> None:
    class Last(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            output = super().forward(input)
            return {"loss": output.square().mean(), "logits": output}

    torch.manual_seed(0)
    model = [nn.Linear(WIDTH, WIDTH), Last(WIDTH, WIDTH)]
    assert penstock.parity(model, torch.randn(ROWS, WIDTH), pipeline={"microbatches": M}).exact


def test_skips_and_a_frozen_stage_are_exact_too() -> None:
    class Sender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return penstock.Routed(self.linear(x), {2: x * 2})

    class Receiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, early: Tensor) -> Tensor:
            return self.linear(x + early)  # type: ignore[no-any-return]

    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    assert check([Sender(), frozen, Receiver()], ranks=3, cut_options=CutOptions(skips=[(0, 2)])).exact


def test_tied_parameters_are_compared_as_one_sum() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    found = check([first, last])
    assert found.output == found.loss == 0.0
    assert found.gradient < 1e-5


def test_weights_and_loss_arguments_reach_both_sides() -> None:
    def loss_fn(output: Tensor, target: Tensor, *, weight: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=weight, ignore_index=-1)

    torch.manual_seed(0)
    target = torch.tensor([0, 1, -1, -1, -1, 2, 3, 4, 5, -1])
    found = penstock.parity(
        [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)],
        torch.randn(ROWS, WIDTH),
        target=target,
        loss_kwargs={"weight": penstock.Shared(torch.rand(WIDTH))},
        pipeline={
            "microbatches": M,
            "loss_fn": loss_fn,
            "loss_options": penstock.LossOptions(weight=lambda goal, weight: weight[goal[goal != -1]].sum()),
            "transport": "threads",
        },
    )
    assert found.exact


def test_a_gradient_that_is_0_but_for_rounding_is_no_difference() -> None:
    """That of an attention's key bias: the rounding of others, which another order of sums makes another number."""
    eps = torch.finfo(torch.float32).eps
    one, other = torch.tensor([eps, -eps]), torch.tensor([-eps, 2 * eps])
    with pytest.raises(ParityError, match="differ by 3 of its largest entry"):
        check_close("a gradient", one, other, 64 * eps)
    assert check_close("a gradient", one, other, 64 * eps, scale=1.0) <= 64 * eps
    with pytest.raises(ParityError):  # a gradient that is small, but more than rounding
        check_close("a gradient", one, other, 64 * eps, scale=1e-2)
    with pytest.raises(ParityError):  # where sums are in order, nothing is rounded in another way
        check_close("a gradient", one, other, 0.0, scale=1.0)


# -- pipelines that are broken on purpose


def patched(monkeypatch: pytest.MonkeyPatch, name: str, stage: int, number: int, change: Callable[..., Any]) -> None:
    """Put `change(original, self, number, ...)` in the place of one method of `Stage`, for one stage and microbatch."""
    original = getattr(Stage, name)

    def method(self: Stage, first: Any, *inputs: Any, **options: Any) -> Any:
        microbatch = first.microbatch if isinstance(first, StageInput) else first
        if (self.part.index, microbatch) == (stage, number):
            return change(original, self, first, *inputs, **options)
        return original(self, first, *inputs, **options)

    monkeypatch.setattr(Stage, name, method)


def mistake(**options: Any) -> str:
    with pytest.raises(ParityError) as caught:
        check(**options)
    return str(caught.value)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("family", ["1f1b", "zb-v", "looped-bfs"])
def test_a_scaled_gradient_is_found_where_it_arrives(
    family: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(original: Any, *inputs: Any, **options: Any) -> Any:
        back = original(*inputs, **options)
        return {stage: [None if grad is None else grad * 1.001 for grad in grads] for stage, grads in back.items()}

    patched(monkeypatch, "backward", 1, 2, scaled)
    text = mistake(schedule=family, recompute=recompute)
    assert text.startswith("step 0, stage 0, microbatch 2, gradient of 0.")
    assert "differ by" in text


def test_a_dropped_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(original: Any, self: Stage, number: int, gradients: Any, **options: Any) -> Any:
        leaves = self.saved.pop(number).leaves
        return {stage: [torch.zeros_like(leaf) for leaf in found] for stage, found in leaves.items()}

    patched(monkeypatch, "backward", 1, 3, dropped)
    text = mistake()
    assert text.startswith("step 0, stage 1, microbatch 3, gradient of 1.")
    assert text.endswith("the plain model has one, the pipeline has none")


def test_a_dropped_weight_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "weight_gradients", 0, 3, lambda original, self, number: None)
    assert mistake(schedule="zb-h1").startswith("step 0, stage 0, microbatch 3, gradient of 0.")


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_random_numbers_of_another_seed_are_found(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepCounter.seed_for

    def wrong(self: StepCounter, microbatch: int, stage: int) -> int:
        return right(self, microbatch, stage) + int((microbatch, stage) == (1, 1))

    monkeypatch.setattr(StepCounter, "seed_for", wrong)
    assert mistake(recompute=recompute).startswith("step 0, stage 1, microbatch 1, output tensor 0: ")


@pytest.mark.parametrize("step", [0, 1])
def test_a_corrupted_buffer_is_found(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def corrupted(original: Any, self: Stage, number: int, *inputs: Any, **options: Any) -> Any:
        made = original(self, number, *inputs, **options)
        calls.append(number)
        if len(calls) == step + 1:
            self.module.norm.running_var.data[2] += 1e-3  # type: ignore[index, operator, union-attr]
        return made

    patched(monkeypatch, "forward", 1, 2, corrupted)
    assert mistake().startswith(f"step {step}, stage 1, microbatch 2, buffer 1.norm.running_var: ")


def test_a_buffer_that_a_backward_changes_is_found_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupted(original: Any, self: Stage, *inputs: Any, **options: Any) -> Any:
        back = original(self, *inputs, **options)
        self.module.norm.num_batches_tracked += 1  # type: ignore[operator, union-attr, assignment]
        return back

    patched(monkeypatch, "backward", 0, 3, corrupted)
    assert mistake(recompute="always").startswith("step 0, stage 0, buffer 0.norm.num_batches_tracked: ")


def test_a_wrong_share_of_the_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.pipeline.batches as module

    class Alike(BatchShares):
        """Ragged microbatches, counted alike."""

        def __call__(self) -> list[float]:
            return [1 / M] * M

    monkeypatch.setattr(module, "BatchShares", Alike)
    assert mistake().startswith("step 0, stage 1, microbatch 0, gradient of 1.")


def test_an_extra_loss_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(original: Any, *inputs: Any, **options: Any) -> Any:
        emitted, loss, _ = original(*inputs, **options)
        return emitted, loss, []

    patched(monkeypatch, "forward", 0, 1, silent)
    assert mistake().startswith("step 0, stage 0, microbatch 1, extra loss size (0): the plain model has one")


def test_an_output_of_another_dtype_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(original: Any, *inputs: Any, **options: Any) -> Any:
        emitted, loss, extra = original(*inputs, **options)
        return {stage: payload.half().float() for stage, payload in emitted.items()}, loss, extra

    patched(monkeypatch, "forward", 0, 1, narrow)
    assert mistake().startswith("step 0, stage 0, microbatch 1, output tensor 0: ")


def test_a_tolerance_lets_small_differences_pass_and_tells_how_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(original: Any, *inputs: Any, **options: Any) -> Any:
        back = original(*inputs, **options)
        return {stage: [grad * (1 + 1e-4) for grad in grads] for stage, grads in back.items()}

    patched(monkeypatch, "backward", 1, 0, scaled)
    found = check(tolerance=1e-3)
    assert 1e-5 < found.gradient < 1e-3
    assert not found.exact


def test_numbers_that_are_none_on_both_sides_are_equal() -> None:
    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0.0 * 0.0

    assert check([nn.Linear(WIDTH, WIDTH), Divides()]).exact


class Forks(nn.Module):
    """One tensor, four times in a payload: its four gradients are added in another order than inside one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = self.linear(x)
        return made, made, made, made


class Joins(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return a.exp() * b.sin() + c.cos() * d.tanh() * a


def test_a_tensor_that_crosses_several_times_may_differ_by_roundings() -> None:
    """A13: that was a ParityError, for a pipeline with nothing wrong in it."""
    torch.manual_seed(3)
    found = check([nn.Linear(WIDTH, WIDTH), Forks(), Joins(), nn.Linear(WIDTH, WIDTH)], ranks=4)
    assert found.output == found.loss == 0.0
    assert found.gradient < 1e-5


def test_what_a_sequential_does_beside_its_layers_cannot_pass_unnoticed() -> None:
    """A2: both sides were cut by position, so that both left the model's own forward out."""

    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) * 2
            return out

    model = Doubled(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    with pytest.raises(penstock.errors.ModelError, match="Doubled has a forward of its own"):
        check(model, stages=2)
    assert check(model, stages=2, example=(torch.randn(2, WIDTH),)).exact
