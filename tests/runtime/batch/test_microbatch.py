"""A batch into microbatches and back: every row goes somewhere, once, and what does not fit is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import Microbatches, Shared
from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch, count_for, split_batch


def split(count: int, *args: Any, target: Any = None, dims: Any = None, **kwargs: Any) -> Batch:
    return split_batch(count, args, kwargs, target, {}, dims or {})


@given(rows=st.integers(1, 40), count=st.integers(1, 40))
def test_every_row_is_in_one_microbatch_in_order_and_none_is_empty(rows: int, count: int) -> None:
    if rows < count:
        with pytest.raises(ModelError, match=f"{rows} rows, fewer than the {count} microbatches"):
            split(count, torch.arange(rows))
        return
    batch = split(count, torch.arange(rows))
    pieces = [args[0] for args in batch.args]
    assert batch.rows == [len(piece) for piece in pieces]
    assert len(pieces) == count
    assert torch.cat(pieces).tolist() == list(range(rows))
    assert max(batch.rows) - min(batch.rows) <= 1
    assert min(batch.rows) >= 1


def test_a_leaf_is_cut_along_its_own_dimension_and_another_not_at_all() -> None:
    x, table = torch.arange(12).reshape(2, 6), torch.arange(5)
    batch = split(3, {"x": x, "table": table}, dims={0: {"x": -1, "table": None}})
    assert [args[0]["x"].shape for args in batch.args] == [(2, 2)] * 3
    assert all(args[0]["table"] is table for args in batch.args)
    assert batch.rows == [2, 2, 2]


def test_none_for_a_whole_argument_cuts_nothing_of_it() -> None:
    pair = (torch.ones(3), torch.ones(7))
    batch = split(2, torch.ones(4), pair, dims={1: None})
    assert [args[1][1].shape for args in batch.args] == [(7,), (7,)]


def test_shared_scalars_and_plain_values_go_to_every_microbatch() -> None:
    table = torch.ones(3)
    batch = split(2, torch.ones(4, 1), scale=torch.tensor(2.0), name="a", none=None, table=Shared(table))
    for kwargs in batch.kwargs:
        assert kwargs["table"] is table
        assert (kwargs["name"], kwargs["none"], kwargs["scale"].item()) == ("a", None, 2.0)


def test_each_microbatch_has_containers_of_its_own() -> None:
    batch = split(2, {"x": torch.ones(4), "notes": [1]})
    first, second = batch.args[0][0], batch.args[1][0]
    first["notes"].append(2)
    first["new"] = 1
    assert second["notes"] == [1]
    assert "new" not in second


def test_the_rows_of_a_ready_split_are_counted_where_its_rows_are() -> None:
    ready = Microbatches([torch.ones(5, 2), torch.ones(5, 3)])
    assert split(2, ready).rows == [5, 5]
    assert split(2, ready, dims={0: 1}).rows == [2, 3]
    assert split(2, Microbatches([{"n": 1}, {"n": 2}])).rows is None  # nothing there has rows


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: split(2, torch.ones(4), mask=torch.ones(3)),
            "'mask' has 3 rows along dimension 0, but argument 0 has 4",
        ),
        (lambda: split(2, torch.ones(4), target=torch.ones(6)), "'target' has 6 rows along dimension 0"),
        (lambda: split(4, torch.ones(3)), "argument 0 has 3 rows, fewer than the 4 microbatches"),
        (lambda: split(2, Microbatches([torch.ones(1)] * 3)), "argument 0 has 3 microbatches, the pipeline 2"),
        (lambda: split(2, torch.ones(4), dims={0: 1}), r"dims\[0\] is 1, but the tensor has shape \(4,\)"),
        (lambda: split(2, (torch.ones(4), 1), dims={0: (0,)}), r"dims\[0\] says nothing about \[1\]"),
        (lambda: split(2, {"x": torch.ones(4)}, dims={0: {"y": 0}}), r"dims\[0\] says nothing about \['x'\]"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(make: Any, words: str) -> None:
    with pytest.raises((ModelError, UsageError), match=words):
        make()


def test_a_batch_of_any_size_goes_into_as_many_microbatches_as_it_has_rows_for() -> None:
    assert count_for(4, (torch.ones(9),), {}, None, {}) == 4
    assert count_for(4, (torch.ones(3),), {}, None, {}) == 3
    assert count_for(4, (), {"n": 1}, None, {}) is None
    assert count_for(4, (Microbatches([1] * 6),), {}, None, {}) == 6


# --- through a pipeline


class Masked(nn.Module):
    """Takes side information by keyword, and only some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, info: dict[str, Any] | None = None) -> Tensor:
        scale = 1.0 if info is None else info["scale"] * info["lengths"].unsqueeze(-1).to(x.dtype)
        return torch.where(mask, self.linear(x), x) * scale


def test_keyword_arguments_reach_the_stages_that_take_them_and_no_other() -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), Masked(), nn.Linear(4, 4), Masked()]
    x, mask, lengths = torch.randn(7, 4), torch.rand(7, 1) > 0.5, torch.arange(7)
    info = {"scale": 0.5, "lengths": lengths}
    pipe = penstock.Pipeline(stages, microbatches=3, loss_fn=F.mse_loss)
    output = pipe.predict(x, mask=mask, info=info)
    with torch.no_grad():
        wanted = stages[3](stages[2](stages[1](stages[0](x), mask, info)), mask, info)
    torch.testing.assert_close(output, wanted)


def test_a_name_of_the_models_input_may_also_be_a_later_stages_name() -> None:
    torch.manual_seed(0)
    pipe = penstock.Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stages=2, microbatches=2)
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe.predict(input=x), pipe.predict(x), rtol=0, atol=0)


def test_a_keyword_that_would_take_the_place_of_what_arrives_is_not_dropped() -> None:
    class Late(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    pipe = penstock.Pipeline([nn.Linear(4, 4), Late()], microbatches=2)
    with pytest.raises(penstock.errors.PeerFailure, match="multiple values for argument 'hidden'"):
        pipe.predict(torch.randn(4, 4), hidden=torch.randn(4, 4))


def test_errors_about_the_batch_are_clear_and_the_pipeline_works_after_them() -> None:
    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=3, loss_fn=F.mse_loss)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    before = pipe.step(x, target=y)
    gradients = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    for args, kwargs, words in [
        ((x[:2],), {"target": y[:2]}, "2 rows, fewer than the 3 microbatches"),
        ((x,), {"target": y[:5]}, "'target' has 5 rows"),
        ((x,), {"target": y, "mask": x}, "no stage takes the keyword argument 'mask'; stages take input"),
    ]:
        with pytest.raises(ModelError, match=words):
            pipe.step(*args, **kwargs)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, pipe.parameters(), strict=True) if b.grad is not None)
    pipe.zero_grad()
    after = pipe.step(x, target=y)
    assert torch.equal(before.loss, after.loss)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, pipe.parameters(), strict=True) if b.grad is not None)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_shapes_may_change_between_microbatches_and_between_steps(schedule: str) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    pipe = penstock.Pipeline(stages, microbatches=3, schedule=schedule, loss_fn=lambda out, y: (out - y).pow(2).mean())
    model = nn.Sequential(*stages)
    for lengths in [(3, 5, 1), (3, 5, 1), (2, 2, 7), (1, 1, 1)]:
        xs = [torch.randn(2, length, 4) for length in lengths]
        ys = [torch.randn(2, length, 4) for length in lengths]
        result = (
            pipe.step(Microbatches(xs), target=Microbatches(ys), outputs=True)
            if len(set(lengths)) == 1
            else (pipe.step(Microbatches(xs), target=Microbatches(ys)))
        )
        got = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        pipe.zero_grad()
        losses = [(model(x) - y).pow(2).mean() for x, y in zip(xs, ys, strict=True)]
        for loss in losses:
            (loss / 3).backward()
        torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses).detach(), rtol=0, atol=0)
        wanted = [parameter.grad for parameter in pipe.parameters()]
        torch.testing.assert_close(got, wanted)
        pipe.zero_grad()


def test_targets_and_outputs_may_be_pytrees() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"twice": x * 2, "parts": (x.sum(), [x[:, 0], "label"])}

    pipe = penstock.Pipeline(
        [nn.Linear(4, 4), Two()],
        microbatches=2,
        loss_fn=lambda out, target: (
            F.mse_loss(out["twice"], target["a"][0]) + F.mse_loss(out["parts"][1][0], target["b"])
        ),
    )
    x = torch.randn(5, 4)
    target = {"a": (torch.randn(5, 4),), "b": torch.randn(5)}
    result = pipe.step(x, target=target, outputs=True)
    assert result.output["twice"].shape == (5, 4)
    assert result.output["parts"][0].shape == (2,)
    assert result.output["parts"][1][0].shape == (5,)
    assert result.output["parts"][1][1] == "label"
    assert not result.output["twice"].requires_grad
    assert pipe.step(x, target=target).output is None
