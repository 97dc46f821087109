"""Buckets of gradients, and which stage a parameter's reduction goes with; one process is enough for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.parallel.data_parallel import reduce
from penstock.parallel.data_parallel.reduce import Bucket, Reducer
from penstock.schedule import build, lower

PROGRAM = lower(build("interleaved-1f1b", 1, 2, 2), reduce=True)


def reducer(*modules: nn.Module) -> Reducer:
    names = {id(each): f"{stage}.{name}" for stage, it in enumerate(modules) for name, each in it.named_parameters()}
    return Reducer(dict(enumerate(modules)), names, None)


def test_gradients_are_taken_over_and_come_back_as_views() -> None:
    one, other = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    one.grad = torch.arange(4.0).reshape(2, 2)
    bucket = Bucket([one, other])
    flat = bucket.fill()
    assert one.grad is None
    assert flat.tolist() == [0, 1, 2, 3, 0, 0, 0]  # zeros for the one that has none
    flat.mul_(2)
    found = dict(zip("ab", (gradient for _, gradient in bucket.spread()), strict=True))
    assert found["a"].tolist() == [[0, 2], [4, 6]]
    assert found["b"].data_ptr() == flat[4:].data_ptr()


def test_buckets_are_of_one_dtype_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "BUCKET_BYTES", 32)
    sizes = [(4, torch.float32), (2, torch.float64), (4, torch.float32), (1, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    buckets = list(reducer()._cut(parameters))
    assert [bucket.sizes for bucket in buckets] == [[4, 4], [1], [2]]


def test_a_parameter_of_two_stages_goes_with_the_one_whose_turn_comes_last() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    made = reducer(first, last)
    made.begin(PROGRAM, 0)
    order = [action.stage for action in PROGRAM.rows[0] if action is not None and str(action).endswith("REDUCE_GRAD")]
    of = {stage: {id(p) for bucket in made._buckets[stage] for p in bucket.parameters} for stage in order}
    assert id(first.weight) in of[order[-1]]
    assert id(first.weight) not in of[order[0]]
    first.bias.grad = torch.ones(2)
    for stage in order:
        made.start(stage)
    assert made.present == 1 << [id(each) for each in made.parameters].index(id(first.bias))


def test_what_was_not_there_at_first_and_what_is_sparse_is_found() -> None:
    module = nn.Embedding(3, 2, sparse=True)
    made = reducer(module, nn.Linear(2, 2))
    made.begin(PROGRAM, 0)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match=r"the gradient of 0\.weight is sparse"):
        made.start(0)
    assert made.strangers(made.held()) == []
    module.weight = nn.Parameter(torch.zeros(3, 2))
    assert made.strangers(made.held()) == ["weight of stage 0"]
