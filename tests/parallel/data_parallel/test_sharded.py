"""What FSDP would refuse in words of its own, or get wrong, is refused before anything is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.parallel.data_parallel.sharded import check_shardable


def parts(module: nn.Module) -> Any:
    return {3: SimpleNamespace(module=module, names={"weight": "layers.7.weight"})}


def test_what_cannot_be_sharded_is_named() -> None:
    linear = nn.Linear(2, 3)
    check_shardable(parts(linear), False, set())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ModelError, match=r"stage 3 has trained parameters of torch\.float32 and torch\.float64"):
        check_shardable(parts(mixed), False, set())
    with pytest.raises(ModelError, match="tied across stages"):
        check_shardable(parts(linear), True, {linear.weight})
    linear.weight.data = torch.zeros(2, 3).T
    with pytest.raises(ModelError, match=r"layers\.7\.weight of stage 3 has shape \(3, 2\) with strides \(1, 3\)"):
        check_shardable(parts(linear), False, set())
    linear.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"layers\.7\.weight of stage 3 has a hook"):
        check_shardable(parts(linear), False, set())
    check_shardable(parts(linear), False, {linear.weight})
