"""What GPipe refuses, by errors of the types that its users catch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.torchgpipe.models import linear, two
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe
from penstock.errors import PenstockError


class Missing(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), linear())
        self._modules["1"] = None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, r"balance is missing.*torchgpipe\.balance import balance_by_time"),
        ({"balance": [1]}, ValueError, r"1 layers, and the model has 2\. .*balance_by_time"),
        ({"balance": [0, 2]}, ValueError, "at least 1 layer"),
        ({"balance": [-1, 3]}, ValueError, "at least 1 layer"),
        ({"balance": "11"}, TypeError, "balance='11'"),
        ({"balance": 2}, TypeError, "balance=2: pass the number of layers of each"),
        ({"balance": [0.5, 1.5]}, TypeError, "such as"),
        ({"balance": [2], "chunks": 0}, ValueError, "chunks=0"),
        ({"balance": [2], "checkpoint": "sometimes"}, ValueError, "'except_last'"),
        ({"balance": [1, 1], "devices": ["cpu"]}, IndexError, "2 partitions .* there are 1"),
        ({"balance": [1, 1], "devices": range(2)}, ValueError, "cuda:0, but torch sees no GPU"),
        ({"balance": [1, 1], "devices": "cpu"}, ValueError, "one device for each stage"),
        ({"module": linear(), "balance": [1]}, TypeError, "nn.Sequential"),
        ({"module": Missing(), "balance": [2]}, ValueError, "layer of the model is None"),
        ({"module": nn.Sequential(*[linear()] * 2), "balance": [2]}, ValueError, "twice"),
        (
            {"module": nn.Sequential(*[nn.Sequential(each) for each in [linear()] * 2]), "balance": [2]},
            ValueError,
            "share",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"module": nn.Sequential(linear(), linear()), **options}
    with pytest.raises(error, match=message) as found:
        GPipe(**options)
    assert isinstance(found.value, PenstockError)


class Says(nn.Module):
    """Returns what is no tensor."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: Tensor) -> Any:
        return (x, "hello") if self.pair else "hello"


@pytest.mark.parametrize("value", ["hello", (torch.rand(2, 1), "hello"), [torch.rand(2, 1)], 42, None])
def test_inputs_are_tensors_or_tuples_of_them(value: Any) -> None:
    with pytest.raises(TypeError, match="the input"):
        two()(value)
    with pytest.raises(TypeError):
        two()(torch.rand(1), torch.rand(1))


@pytest.mark.parametrize("pair", [False, True])
def test_outputs_are_tensors_or_tuples_of_them(pair: bool) -> None:
    with pytest.raises(TypeError, match="the output"):
        GPipe(nn.Sequential(Says(pair)), [1], devices=["cpu"], chunks=2)(torch.rand(2, 1))
