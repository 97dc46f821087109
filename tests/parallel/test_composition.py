"""What a pipeline is composed with, before anything is built."""

from __future__ import annotations

import pytest

from penstock import ParallelOptions, TensorPlan
from penstock.errors import UsageError
from penstock.parallel.composition import Composition
from penstock.schedule import build, lower


def test_a_pipeline_by_itself_needs_no_reductions() -> None:
    alone = Composition(None, ParallelOptions())
    schedule = build("1f1b", 2, 3)
    assert str(alone) == ""
    assert alone.is_first
    assert not alone.shards
    assert alone.lowered(schedule) == lower(schedule)
    assert alone.lowered(lower(schedule)) == lower(schedule)


def test_wrapped_stages_get_the_reductions_that_a_program_lacks() -> None:
    wrapped = Composition(None, ParallelOptions())
    wrapped.wrapped = frozenset({"DistributedDataParallel"})
    schedule = build("1f1b", 2, 3)
    assert wrapped.lowered(schedule) == lower(schedule, reduce=True)
    assert wrapped.lowered(lower(schedule)).ops == lower(schedule, reduce=True).ops
    assert wrapped.lowered(lower(schedule, reduce=True)) == lower(schedule, reduce=True)


def test_a_plan_for_spread_tensors_needs_an_axis() -> None:
    with pytest.raises(UsageError, match="spreads tensors over an axis 'tp': pass mesh="):
        Composition(None, ParallelOptions(tensor_plan=TensorPlan({"a": "colwise"})))
