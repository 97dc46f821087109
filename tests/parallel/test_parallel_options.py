"""Options of replicas and spread tensors that contradict each other are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import penstock
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicate": "zero"}, r"ParallelOptions\(replicate='zero'\): choose one of None, 'ddp', 'fsdp'"),
        ({"replicate": "fsdp", "window": 0}, r"window=0\): pass how many stages per rank are complete"),
        ({"window": 2}, r"\(window=\) is about sharded parameters; pass replicate='fsdp'"),
        ({"replicate": "fsdp", "shard_precision": "bf16"}, "MixedPrecisionPolicy"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        penstock.ParallelOptions(**options)


@pytest.mark.parametrize(("options", "said"), [({"replicate": "ddp"}, "needs mesh="), ({"tensor_plan": "gpt"}, "'tp'")])
def test_what_needs_a_mesh_says_so(options: dict[str, Any], said: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match=said):
        penstock.Pipeline(model, stages=2, microbatches=2, parallel_options=penstock.ParallelOptions(**options))
