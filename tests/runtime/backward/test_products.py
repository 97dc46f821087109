"""Products with a parameter, taken apart: the same bits for every shape, layout and kind of product."""

from __future__ import annotations

import copy

import pytest
import torch
from runtime.backward.comparing import (
    Apply,
    check,
    normal,
)
from tiers import by_turns
from torch import Tensor, nn

SHAPES = [(5,), (1, 5), (7, 5), (3, 4, 5), (1, 1, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5), (33, 17, 5)]


def strided(shape: tuple[int, ...], layout: str) -> Tensor:
    if layout == "contiguous":
        return torch.randn(shape)
    if layout == "every other":
        return torch.randn(*shape[:-1], shape[-1] * 2)[..., ::2]
    return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("dtype", "layout", "bias"),
    by_turns(
        [torch.float32, torch.float64, torch.bfloat16],
        ["contiguous", "every other", "reversed"],
        [True, False],
        fast=[(torch.float32, "contiguous", True), (torch.float32, "every other", True)],
    ),
    ids=str,
)
def test_linear_has_the_same_bits_for_every_shape_and_layout(dtype: torch.dtype, layout: str, bias: bool) -> None:
    for shape in SHAPES:
        # A product before and after, so that the layer's input has history and its output is not the stage's.
        layer = Apply(lambda m, x: m.layer(x * 1.5) * 0.5, layer=nn.Linear(5, 6, bias=bias, dtype=dtype))
        assert check(layer, lambda shape=shape: [strided(shape, layout).to(dtype)]) == 1, shape


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5)])
def test_gradients_that_are_expanded_or_transposed(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(5, 6)
    assert check(layer, normal(*shape), gradient=lambda y: torch.ones(()).expand_as(y)) == 1
    assert (
        check(layer, normal(*shape), gradient=lambda y: torch.randn(y.shape[::-1]).permute(*range(y.dim())[::-1])) == 1
    )
    assert check(Apply(lambda m, x: m.layer(x).sum(), layer=layer), normal(*shape)) == 1


def test_a_weight_that_is_laid_out_by_columns() -> None:
    layer = nn.Linear(5, 6)
    layer.weight = nn.Parameter(torch.randn(5, 6).t())
    assert check(layer, normal(7, 5)) == 1
    assert check(layer, normal(3, 7, 5)) == 1
    product = Apply(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.randn(6, 5).t()))
    assert check(product, normal(7, 5)) == 1


@pytest.mark.parametrize("layout", ["contiguous", "every other", "reversed"])
@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_matmul_on_a_parameter(shape: tuple[int, ...], layout: str) -> None:
    for function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
        module = Apply(lambda m, x, f=function: f(x * 2, m.weight), weight=nn.Parameter(torch.randn(5, 6)))
        assert check(module, lambda: [strided(shape, layout)]) == 1


def test_addmm_mm_and_bmm_on_a_parameter() -> None:
    bias, weight = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(5, 6))
    assert check(Apply(lambda m, x: torch.addmm(m.bias, x, m.weight), bias=bias, weight=weight), normal(7, 5)) == 1
    assert check(Apply(lambda m, x: torch.mm(x, m.weight), weight=weight), normal(7, 5)) == 1
    experts = nn.Parameter(torch.randn(3, 5, 6))
    assert check(Apply(lambda m, x: torch.bmm(x, m.experts), experts=experts), normal(3, 7, 5)) == 1
    # Not the plain case: left to I.
    scaled = Apply(lambda m, x: torch.addmm(m.bias, x, m.weight, beta=0.5), bias=bias, weight=weight)
    assert check(scaled, normal(7, 5)) == 0
    assert check(Apply(lambda m, x: m.weight @ x, weight=weight), normal(6, 3)) == 0
    assert check(Apply(lambda m, x: x @ m.weight, weight=weight), normal(5)) == 0


CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3), (2, 4, 9), 1),
    (nn.Conv1d(4, 6, 3, padding=2, dilation=2, bias=False), (2, 4, 9), 1),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 8), 1),
    (nn.Conv2d(4, 6, (3, 1), groups=2, dilation=(2, 1)), (2, 4, 9, 8), 1),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 8), 1),
    (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8), 1),
    (nn.Conv2d(4, 6, 3), (4, 9, 8), 1),
    (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 9, 8), 1),
    (nn.Conv3d(2, 4, 2), (2, 2, 5, 5, 5), 1),
    (nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 8), 0),
    (nn.ConvTranspose2d(4, 6, 3), (2, 4, 9, 8), 0),
]


@pytest.mark.parametrize(("layer", "shape", "waiting"), CONVOLUTIONS, ids=str)
def test_convolutions(layer: nn.Module, shape: tuple[int, ...], waiting: int) -> None:
    assert check(layer, normal(*shape)) == waiting
    assert check(copy.deepcopy(layer).double(), normal(*shape, dtype=torch.float64)) == waiting


def test_a_convolution_in_channels_last() -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
    assert check(layer, lambda: [torch.randn(2, 4, 9, 8).to(memory_format=torch.channels_last)]) == 1
