"""Tensors that lie in memory as others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.runtime.state.memory_layout import LINE, blank_like, copy_like, elements_in, phase_of, regions

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "at an odd offset": lambda x: x.flatten()[3:15].view(3, 4),
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[1:, 1:4],
    "one column": lambda x: x[:, 2],
    "expanded": lambda x: x[1:2, 1:].expand(7, -1),
    "expanded all over": lambda x: x[1, 1].expand(2, 3),
    "windows that overlap": lambda x: x.flatten()[1:].unfold(0, 4, 2),
    "one element": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
    "a dimension of 1 with a strange stride": lambda x: x[1:2].t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_lies_as_the_original(way: str, dtype: torch.dtype) -> None:
    tensor = WAYS[way](torch.randn(5, 6).to(dtype))
    for other in (blank_like(tensor), copy_like(tensor)):
        assert (other.shape, other.stride(), other.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert phase_of(other) == phase_of(tensor)
        assert not other._is_view()
    copied = copy_like(tensor)
    assert torch.equal(copied, tensor)
    if tensor.numel():
        assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_what_torch_allocates_starts_a_line() -> None:
    assert {torch.empty(size, dtype=torch.uint8).data_ptr() % LINE for size in range(1, 300, 7)} == {0}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_go_through_a_copy_as_they_are(way: str) -> None:
    tensor = WAYS[way](torch.randn(5, 6)).detach().requires_grad_()
    copied = copy_like(tensor)
    assert copied.requires_grad
    assert not copied.is_leaf
    gradient = WAYS["transposed"](torch.randn(tensor.shape[::-1])) if tensor.dim() == 2 else torch.randn(tensor.shape)
    (found,) = torch.autograd.grad(copied, tensor, gradient)
    assert found.data_ptr() == gradient.data_ptr()
    assert found.stride() == gradient.stride()


def test_a_copy_of_memory_that_is_not_aligned_to_its_elements() -> None:
    """As other libraries map it: the nearest place that a tensor of torch can have."""
    tensor = torch.frombuffer(bytearray(64), dtype=torch.uint8)[1:41]
    odd = torch.frombuffer(memoryview(tensor.numpy()), dtype=torch.float32)
    assert torch.equal(copy_like(odd), odd)


def test_tensors_that_overlap_are_in_one_region() -> None:
    x, y = torch.randn(4, 6), torch.randn(3)
    first, second, third = x.chunk(3, dim=1)  # no element in common, but between each other
    found = regions([y, first, x[3:, 5:], second, third, y, torch.empty(0), x[:0]])
    assert [region.members for region in found] == [[0, 5], [1, 3, 4, 2], [6], [7]]
    assert found[1].address == x.data_ptr()
    assert found[1].nbytes == x.nbytes
    assert [region.members for region in regions(x)] == [[0], [1], [2], [3]]  # side by side in one storage


def test_elements_in() -> None:
    assert elements_in((2, 3), (10, 1)) == 13
    assert elements_in((2, 3), (0, 1)) == 3
    assert elements_in((), ()) == 1
    assert elements_in((2, 0), (1, 1)) == 0
