"""A wrong argument is refused by its name and value, before anything is built."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, UsageError
from penstock.schedule import Op


def pipeline(**options: Any) -> penstock.Pipeline:
    given = {"model": [nn.Linear(4, 4), nn.Linear(4, 4)], "microbatches": 2, "loss_fn": F.mse_loss, **options}
    return penstock.Pipeline(given.pop("model"), **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", None),
        ("schedule", 1),
        ("ranks", True),
        ("stages", "2"),
        ("microbatches", 2.0),
        ("timeout", "60"),
        ("timeout", None),
        ("timeout", float("nan")),
        ("seed", "7"),
        ("loss_fn", 3),
        ("init", 3),
        ("group", "pp"),
        ("mesh", "pp"),
        ("devices", "cpu"),
        ("devices", ["cpu", "moon"]),
        ("loss_options", None),
        ("batch_options", 3),
        ("cut_options", {"method": "graph"}),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        pipeline(**{name: value})
    assert str(refused.value).startswith(f"{name}={value!r}: ")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (penstock.LossOptions, "weight", 3),
        (penstock.LossOptions, "reduction", "max"),
        (penstock.LossOptions, "per_microbatch", None),
        (penstock.BatchOptions, "split", "auto"),
        (penstock.BatchOptions, "dims", [1]),
        (penstock.BatchOptions, "dims", {"mask": "1"}),
        (penstock.BatchOptions, "dims", {"mask": {"a": True}}),
        (penstock.BatchOptions, "inputs", "last"),
        (penstock.BatchOptions, "batch_norm", "synced"),
        (penstock.BatchOptions, "batch_norm_group", "dp"),
        (penstock.CutOptions, "method", "trace"),
        (penstock.CutOptions, "skips", [(0, "1")]),
        (penstock.CutOptions, "skips", 3),
        (penstock.CutOptions, "speeds", "fast"),
        (penstock.CutOptions, "optimizer", "muon"),
        (penstock.ParallelOptions, "replicate", "zero"),
        (penstock.ParallelOptions, "window", 0),
        (penstock.ParallelOptions, "shard_precision", "bf16"),
    ],
)
def test_so_is_one_inside_of_a_group_of_options(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        kind(**{name: value})
    assert str(refused.value).startswith(f"{kind.__name__}({name}={value!r}): ")


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (penstock.LossOptions, {"weight": len, "reduction": "sum"}, "weighs the terms of a mean"),
        (penstock.ParallelOptions, {"window": 2}, "pass replicate='fsdp' with it"),
        (penstock.ParallelOptions, {"replicate": "ddp", "window": 2}, "pass replicate='fsdp' with it"),
    ],
)
def test_options_that_contradict_each_other_are_refused(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kind(**options)


def test_options_are_values() -> None:
    for kind in (penstock.LossOptions, penstock.BatchOptions, penstock.CutOptions, penstock.ParallelOptions):
        assert kind() == kind()
        assert kind.__doc__
        with pytest.raises(AttributeError):
            kind().anything = 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": nn.Sequential(), "stages": 1}, "the model is an empty Sequential"),
        (
            {"cut_options": penstock.CutOptions(speeds=[1.0, 0.5])},
            "helps to find a cut, but a list of stage modules says",
        ),
        ({"init": lambda name, tensor: None}, "init= fills parameters that were built under penstock.lazy"),
    ],
)
def test_what_does_not_apply_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, ModelError), match=words):
        pipeline(**options)


def test_a_handler_is_a_function_for_an_op_that_there_is() -> None:
    pipe = pipeline()
    seen: list[str] = []

    def watched(action: Any, context: Any) -> None:
        seen.append(str(action))
        context.run(action)

    with pytest.raises(UsageError, match=r"op='X': choose one of Op.F, Op.B"):
        pipe.register("X", watched)
    with pytest.raises(UsageError, match="handler=3: pass a function"):
        pipe.register(Op.F, 3)  # type: ignore[arg-type]
    pipe.register("F", watched)
    pipe.predict(torch.randn(4, 4))
    assert "0F0" in seen


def test_a_pipeline_is_neither_copied_nor_pickled() -> None:
    for use in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="a Pipeline has threads and connections, and cannot be copied or pickled"):
            use(pipeline())


def test_records_do_not_nest_and_one_without_steps_stays_empty() -> None:
    pipe = pipeline()
    with pipe.record() as timeline, pytest.raises(UsageError, match=r"in a record.. already"), pipe.record():
        pass
    assert not timeline.spans


def test_a_closed_pipeline_says_that_it_is_closed() -> None:
    pipe, x = pipeline(), torch.randn(4, 4)
    pipe.step(x, target=x)
    pipe.close()
    for call in (pipe.step, pipe.evaluate, pipe.predict):
        with pytest.raises(UsageError, match="this pipeline is closed"):
            call(x)
