"""What hides the blocks of a model is refused with what to pass instead; a single stage may be wrapped."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from penstock.errors import UsageError
from penstock.model.original.wrappers import DYNAMO, refuse_compiled_model, refuse_wrapped_model, wrappings


class Compiled(nn.Module):
    """In the place of torch's own, which takes seconds to import."""


def test_a_model_that_is_wrapped_or_compiled_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, DYNAMO, SimpleNamespace(OptimizedModule=Compiled))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_wrapped_model(model)
    refuse_compiled_model(model)
    with pytest.raises(UsageError, match=r"wrapped in DataParallel.*pass the plain model that is its \.module"):
        refuse_wrapped_model(nn.DataParallel(model))
    with pytest.raises(UsageError, match=r"compile its blocks one by one: block\.compile\(\)"):
        refuse_compiled_model(Compiled())


def test_how_a_stage_is_wrapped_is_what_it_says_of_itself_or_what_is_found_in_it() -> None:
    plain, declared = nn.Linear(2, 2), nn.Linear(2, 2)
    declared.wrapped_in = frozenset({"fully_shard"})  # type: ignore[assignment]
    assert wrappings(plain) == frozenset()
    assert wrappings(declared) == {"fully_shard"}
