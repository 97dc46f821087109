"""From a configuration to a model: fresh weights, what is frozen, and what a user's function may return."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.tools.train.build import build_model, example_of, freeze
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch

SMALL = ["model.options.layers=2", "model.options.width=16", "model.options.heads=2"]


def test_fresh_weights_follow_the_seed_and_nothing_else() -> None:
    one, again, other = (build_model(load_config(None, [*SMALL, f"seed={seed}"]))[0] for seed in (1, 1, 2))
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    assert not torch.equal(one.head.scores.weight, other.head.scores.weight)


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module of the user's whose `model()` returns what a test puts there."""
    mine = SimpleNamespace(value=None, model=lambda: mine.value)
    monkeypatch.setitem(sys.modules, "mine_built", mine)  # type: ignore[arg-type]
    return mine


def test_a_function_returns_a_model_or_a_model_and_its_loss(returned: SimpleNamespace) -> None:
    config = load_config(None, ["model.source=mine_built:model", "model.options={}"])
    returned.value = nn.Linear(2, 2)
    assert build_model(config) == (returned.value, None)
    returned.value = (nn.Linear(2, 2), nn.functional.mse_loss)
    assert build_model(config) == returned.value
    for value, kind in (("a model", "str"), ((nn.Linear(2, 2), 3), "tuple")):
        returned.value = value
        with pytest.raises(UsageError, match=f"mine_built:model returned a {kind}; return an nn.Module, or"):
            build_model(config)


def trained(*patterns: str) -> list[str]:
    """The parameters that are trained still, when these patterns were frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze(model, patterns)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_of_several_patterns_that_match_the_last_one_counts() -> None:
    assert trained() == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert trained("0.*") == ["1.weight", "1.bias"]
    assert trained("*", "!*.bias") == ["0.bias", "1.bias"]
    assert trained("*", "!*.bias", "0.*") == ["1.bias"]


def test_patterns_that_match_nothing_or_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match=r"training\.freeze: .*2\.\*"):
        trained("2.*")
    with pytest.raises(UsageError, match=r"freezes all 4 parameters of the model.*\"!1\.bias\""):
        trained("*")


def test_a_cut_looks_at_about_the_first_microbatch() -> None:
    rows, mask = torch.arange(10), torch.ones(10, 2)
    assert [each.tolist() for each in example_of(DataBatch((rows,), {}, rows, 10), 4)] == [[0, 1]]
    found = example_of(DataBatch((), {"ids": rows, "mask": mask, "scale": 2.0}, rows, 10), 20)
    assert isinstance(found, dict)
    assert (found["ids"].tolist(), found["mask"].shape, found["scale"]) == ([0], (1, 2), 2.0)
