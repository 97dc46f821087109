"""What a rank's process takes before it has a model, measured in a process like one."""

from __future__ import annotations

import pytest
from torch import nn

from penstock.errors import RunError
from penstock.tools.train.run.baseline import code_of, process_bytes


@pytest.mark.slow
def test_a_forked_process_has_little_of_what_it_never_uses() -> None:
    alone, forked = process_bytes([], forked=False), process_bytes([])
    assert 100e6 < forked < alone < 2e9
    assert process_bytes(["transformers"], forked=False) > alone + 5e6


@pytest.mark.slow
def test_a_library_that_cannot_be_loaded_ends_the_measurement_with_its_error() -> None:
    with pytest.raises(RunError, match=r"(?s)has failed: .*No module named 'no_such_library'"):
        process_bytes(["no_such_library"])


def test_the_code_of_a_model_is_that_of_libraries_and_not_of_torch_or_the_user() -> None:
    other = type("Other", (nn.Module,), {"__module__": "transformers.models.other"})
    again = type("Again", (nn.Module,), {"__module__": "peft.tuners"})
    mine = type("Mine", (nn.Module,), {"__module__": "mine"})
    assert code_of([other(), other(), nn.Linear(1, 1), again(), mine()]) == ["peft.tuners", "transformers.models.other"]
