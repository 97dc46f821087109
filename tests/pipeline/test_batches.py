"""What a step is given: what would be taken for something else, or would train nothing, is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchOptions, LossOptions, Microbatches, Shared
from penstock.errors import ModelError, PeerFailure, UsageError

X, Y = torch.randn(7, 4), torch.randn(7, 4)


class Shifted(nn.Linear):
    def forward(self, input: Tensor, bias: Any = None, info: Any = None) -> Tensor:
        out = super().forward(input)
        out = out if bias is None else out + bias
        return out if info is None else out * info["scale"]


def pipeline(**options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    stages = [Shifted(4, 4), nn.Linear(4, 4)]
    return penstock.Pipeline(stages, **{"microbatches": 4, "loss_fn": F.mse_loss, **options})


# --- rows


def test_a_bias_that_came_split_does_not_decide_what_rows_count() -> None:
    pipe = pipeline()
    shared = pipe.step(X, target=Y, bias=Shared(torch.ones(4)))
    split = pipe.step(X, target=Y, bias=Microbatches([torch.ones(4)] * 4))
    assert torch.equal(shared.loss, split.loss)
    ready = [Microbatches(value.tensor_split(4)) for value in (X, Y)]
    again = pipe.step(ready[0], target=ready[1], bias=Microbatches([torch.ones(4)] * 4))
    assert torch.equal(shared.loss, again.loss)


def test_a_target_that_was_split_otherwise_than_the_input_is_an_error() -> None:
    other = Microbatches([Y[:4], Y[4:5], Y[5:6], Y[6:]])
    with pytest.raises(ModelError, match=r"'target' has \[4, 1, 1, 1\] rows .* argument 0 has \[2, 2, 2, 1\]"):
        pipeline().step(X, target=other)


def test_a_microbatch_without_rows_is_an_error() -> None:
    """It was a ZeroDivisionError on the last rank."""
    empty = Microbatches([Y[:4], Y[:0], Y[4:6], Y[6:]])
    with pipeline() as pipe:
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(ModelError, match=r"'target' has \[4, 0, 2, 1\] rows .* give each at least one row"):
                call(empty, target=empty)
        assert pipe.predict(empty).shape == Y.shape


def test_an_empty_batch_has_nothing_to_compute() -> None:
    pipe = pipeline()
    for call in (pipe.predict, lambda x: pipe.step(x, target=x), lambda x: pipe.evaluate(x, target=x)):
        with pytest.raises(ModelError, match=r"argument 0 has 0 rows .* an empty batch has nothing to compute"):
            call(X[:0])


# --- marks and objects


def test_shared_counts_inside_a_container_and_microbatches_does_not() -> None:
    pipe, table = pipeline(), torch.full((4,), 2.0)
    inside = pipe.step(X, target=Y, info={"scale": Shared(table)})
    torch.testing.assert_close(inside.loss, pipe.step(X, target=Y, info=Shared({"scale": table})).loss)
    with pytest.raises(UsageError, match=r"'info' has penstock.Microbatches inside a container"):
        pipe.step(X, target=Y, info={"scale": Microbatches([table] * 4)})


@dataclass
class Labels:
    values: Tensor


class Slotted:
    __slots__ = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values


@pytest.mark.parametrize("kind", [Labels, Slotted, lambda y: Labels([{"deep": y}])])
def test_an_object_that_hides_tensors_is_refused_unless_it_is_marked(kind: Any) -> None:
    pipe = pipeline(loss_fn=lambda out, target: out.mean())
    with pytest.raises(ModelError, match=r"'target' is or holds a (Labels|Slotted), which has tensors"):
        pipe.step(X, target=kind(Y))
    pipe.step(X, target=Shared(kind(Y)))
    pipe.step(X, target=Microbatches([kind(part) for part in Y.tensor_split(4)]))


# --- labels


@pytest.mark.parametrize("label", ["taget", 1, "input"])
def test_a_label_that_nothing_has_is_refused(label: Any) -> None:
    pipe = pipeline(batch_options=BatchOptions(dims={label: 0}))
    with pytest.raises(UsageError, match=rf"dims names {label!r}, .* it has 0, 'target', 'output'"):
        pipe.step(X, target=Y)


def test_a_label_of_an_optional_argument_may_be_left_out_of_a_call() -> None:
    def loss(output: Tensor, target: Tensor, weight: Any = 1.0) -> Tensor:
        return ((output - target) * weight).pow(2).mean()

    pipe = pipeline(batch_options=BatchOptions(dims={"bias": None, "weight": None}), loss_fn=loss)
    pipe.predict(X)
    pipe.step(X, target=Y, bias=torch.ones(4), loss_kwargs={"weight": torch.ones(4)})


# --- steps that would train nothing


def test_a_step_that_would_train_nothing_is_an_error() -> None:
    pipe = pipeline()
    with torch.no_grad(), pytest.raises(UsageError, match=r"step\(\) was called under torch.no_grad"):
        pipe.step(X, target=Y)
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter of the model requires grad"):
        pipe.step(X, target=Y)
    next(pipe.parameters()).requires_grad_()
    pipe.step(X, target=Y)
    with pytest.raises(UsageError, match="has no backward, so step"):
        pipeline(schedule="forward-only").step(X, target=Y)


@pytest.mark.parametrize("loss", [lambda o, t: F.mse_loss(o, t).detach(), lambda o, t: (o > t).sum()])
def test_a_loss_that_leads_nowhere_is_an_error(loss: Any) -> None:
    with pytest.raises(PeerFailure, match="does not require grad, so nothing would be trained"):
        pipeline(loss_fn=loss).step(X, target=Y)


def test_a_loss_that_is_not_there_is_an_error() -> None:
    """A loss_fn without `return`: the step trained nothing and said nothing."""
    with pytest.raises(PeerFailure, match=r"the loss from .*<lambda> is None, so nothing would be trained"):
        pipeline(loss_fn=lambda o, t: None).step(X, target=Y)


def test_wrong_loss_keywords_are_refused() -> None:
    with pytest.raises(UsageError, match="loss_kwargs is a list; pass a dict"):
        pipeline().step(X, target=Y, loss_kwargs=[1])  # type: ignore[arg-type]


# --- weights and named losses


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None, torch.ones(2), "many"])
def test_a_weight_that_is_no_weight_is_an_error_with_the_microbatch(value: Any) -> None:
    with pytest.raises(ModelError, match=r"weight=\) gave .* for microbatch 0"):
        pipeline(loss_options=LossOptions(weight=lambda target: value)).step(X, target=Y)


@pytest.mark.parametrize(("value", "words"), [(torch.ones(3), r"a tensor of shape \(3,\)"), (1.0, "a float")])
def test_a_named_loss_must_be_a_scalar_tensor(value: Any, words: str) -> None:
    class Adds(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            penstock.add_loss("balance", value)
            return super().forward(input)

    pipe = penstock.Pipeline([Adds(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(PeerFailure, match=rf"add_loss\('balance', ...\) got {words}"):
        pipe.step(X, target=Y)
