"""The state of an optimizer in a checkpoint is of the kind that the optimizer keeps, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_files import forge
from train_runs import Run

import penstock
from penstock.checkpoint.load.optimizer_state import state_faults, state_of
from penstock.errors import CheckpointError, FileError

NAME = "head.weight"
SHAPE = (4, 4)
WHOLE = {"dtype": "float32", "shape": [4, 4]}
COUNT = {"dtype": "float32", "shape": []}


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        (torch.optim.AdamW, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.Adam, {"amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.SGD, {"lr": 0.1}, set()),
        (torch.optim.LBFGS, {}, set()),
    ],
)
def test_what_an_optimizer_keeps_is_seen_and_it_is_not_touched(
    kind: Any, options: dict[str, Any], kept: set[str]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = kind([parameter], **options)
    assert set(state_of(optimizer, optimizer.param_groups[0], parameter)) == kept
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(SHAPE))


@pytest.mark.parametrize(
    ("entry", "saved", "good"),
    [
        ({"$tensor": "a"}, WHOLE, True),
        ({"$tensor": "a"}, {**WHOLE, "shape": [4]}, False),
        ({"$tensor": "a"}, {**WHOLE, "dtype": "int64"}, False),
        ({"$tensor": "b"}, WHOLE, False),
        (-1, WHOLE, False),
        (None, WHOLE, False),
    ],
)
def test_state_of_another_kind_or_shape_is_a_fault(entry: Any, saved: Any, good: bool) -> None:
    due = {"exp_avg": torch.zeros(3, 5)}
    assert bool(list(state_faults(NAME, {"exp_avg": entry}, due, SHAPE, {"a": saved}))) != good


def test_a_count_is_one_number_and_a_parameter_that_was_never_updated_has_nothing() -> None:
    due = {"step": torch.tensor(0.0)}
    assert not list(state_faults(NAME, {"step": {"$tensor": "a"}}, due, SHAPE, {"a": COUNT}))
    assert list(state_faults(NAME, {"step": {"$tensor": "a"}}, due, SHAPE, {"a": WHOLE}))
    assert not list(state_faults(NAME, {}, due, SHAPE, {}))
    assert not list(state_faults(NAME, None, due, SHAPE, {}))
    assert list(state_faults(NAME, [1], due, SHAPE, {}))


def of_first(part: str, *path: Any) -> Callable[[dict[str, Any], Any], None]:
    """Return what puts a value at a place of what the first process has saved."""

    def change(index: dict[str, Any], value: Any) -> None:
        place = index["processes"][0][part]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "value", "words"),
    [
        (of_first("optimizer", "state", "embed.weight", "exp_avg"), -1, "exp_avg of embed.weight"),
        (
            of_first("optimizer", "state", "embed.weight", "step"),
            {"$tensor": "optimizer.embed.weight.exp_avg"},
            "step of",
        ),
        (of_first("optimizer", "groups", 0, "options", "lr"), "x", "options.lr is 'x', where such a value as 0.0"),
        (of_first("optimizer", "groups", 0, "options", "lr"), None, "options.lr is 'NoneType'"),
        (of_first("optimizer", "groups", 0, "options", "amsgrad"), -0.5, "options.amsgrad is '-0.5'"),
        (of_first("scheduler", "last_epoch"), "x", "last_epoch is 'x', where such a value as"),
        (of_first("scheduler", "step"), 3, "'step' is no part of its state"),
        (of_first("clock", "seed"), 10**30, r"index\.json: clock\[0\] is '1000000"),
        (of_first("clock", "step"), "x", r"index\.json: clock\[1\] is 'x'"),
    ],
)
def test_values_of_another_kind_are_refused_before_training_goes_on(
    run: Run, saved: Path, change: Any, value: Any, words: str
) -> None:
    run.steps(1)
    penstock.save(saved.with_name("forged"), run.pipe, run.optimizer, **run.parts())
    forged = saved.with_name("forged")
    index = json.loads((forged / "index.json").read_bytes())
    change(index, value)
    forge(forged, index_json=json.dumps(index).encode())
    with pytest.raises((CheckpointError, FileError), match=words):
        penstock.load(forged, run.pipe, run.optimizer, **run.parts())
    run.steps(1)


@pytest.mark.parametrize(("before", "after"), [(None, True), (True, None), (False, True)])
def test_an_optimizer_may_be_implemented_otherwise_than_when_it_was_saved(
    run: Run, saved: Path, before: bool | None, after: bool | None
) -> None:
    for group in run.optimizer.param_groups:
        group["foreach"] = before
    penstock.save(saved.with_name("other"), run.pipe, run.optimizer)
    for group in run.optimizer.param_groups:
        group["foreach"] = after
    penstock.load(saved.with_name("other"), run.pipe, run.optimizer)
    assert [group["foreach"] for group in run.optimizer.param_groups] == [before, before]
