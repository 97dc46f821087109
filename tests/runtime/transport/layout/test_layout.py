"""Layouts: a value fits one only if it lies in memory as the first did, and arrives as it lay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime.state.memory_layout import phase_of
from penstock.runtime.transport.layout.layout import Frame, Layout, flatten
from penstock.runtime.transport.layout.tensor_places import DIRECT_BYTES, HEADER_BYTES

X = torch.arange(60.0).view(5, 12)


def of(value: Any) -> Layout:
    return Layout.of(flatten(value), False)


def sent(value: Any) -> Any:
    """The value as it arrives from another process."""
    layout = of(value)
    frame = Frame(layout.frame_bytes, layout.copies)
    directs = [octets for octets, _ in layout.pack(flatten(value).items, frame)]
    carriers = [home.make_carrier(None).copy_(octets) for home, octets in zip(layout.directs, directs, strict=True)]
    return Layout.load(layout.text, is_known=True).build(frame.tensor, carriers, None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X[1:3], X[2:4]),  # at another place in a cache line
        (X[:4, :4], X[:4, :4].contiguous()),
        (X[:4, :4], X[:4, :4].contiguous().t()),
        (X[:1].expand(5, 12), X),
        ((X, X), (X, X.clone())),
        ((X, X.clone()), (X, X)),
        ((X, X[0]), (X, X[4])),
        ((X[0], X[2]), (X.flatten()[:12], X.flatten()[8:20])),
        ({"a": X, "b": X[:0]}, {"a": X[:0], "b": X}),
    ],
)
def test_a_value_that_lies_in_another_way_does_not_fit(one: Any, other: Any) -> None:
    for layout, fitting, strange in ((of(one), one, other), (of(other), other, one)):
        assert layout.fits(fitting) is not None
        assert Layout.load(layout.text, is_known=True).fits(fitting) is not None
        assert layout.fits(strange) is None


def test_the_same_lie_in_other_memory_fits() -> None:
    other = torch.zeros(64)[:60].view(5, 12)
    assert of((X, X[1:, 3])).fits((other, other[1:, 3])) is not None
    assert of((X[0], X[2])).fits((other[0], X[2])) is not None


def test_an_empty_tensor_is_in_nobodys_way() -> None:
    value = (X, X[2:2], torch.empty(0))
    assert of(value).fits(value) is not None
    assert [tensor.shape for tensor in sent(value)] == [tensor.shape for tensor in value]


@pytest.mark.parametrize("size", [3, DIRECT_BYTES])
def test_tensors_that_share_memory_count_writes_together(size: int) -> None:
    """Else autograd would not see that one which a graph has saved was changed through the other."""
    x = torch.ones(2, size)
    for value in ((x, x), (x, x[1:]), (x[:, 1:], x[:, :-1])):
        one, other = sent(value)
        assert torch.equal(one, value[0])
        assert torch.equal(other, value[1])
        version = other._version
        one[-1].mul_(3)
        assert other._version == version + 1
        assert other[-1, 1 - other.shape[1]].item() == 3
        assert one.is_leaf
        assert not one._is_view()


def test_tensors_side_by_side_count_writes_apart() -> None:
    one, other = sent((X[:2], X[2:]))
    version = other._version
    one.mul_(2)
    assert other._version == version


@pytest.mark.parametrize(("tensor", "carried"), [(X[:, 0], 5), (X[:, ::2], 30), (X[:1].expand(9, 12), 12), (X.t(), 60)])
def test_only_elements_travel_and_each_once(tensor: Tensor, carried: int) -> None:
    assert of(tensor).payload_bytes == carried * 4
    assert of((tensor, tensor)).payload_bytes == carried * 4
    assert torch.equal(sent(tensor), tensor)


def test_memory_that_is_not_aligned_to_its_elements_arrives_as_near_as_may_be() -> None:
    odd = torch.frombuffer(bytearray(64), dtype=torch.uint8)[1:41].numpy().view("float32")
    tensor = torch.frombuffer(memoryview(odd), dtype=torch.float32)
    for arrived in (sent(tensor), *sent((tensor, tensor))):
        assert torch.equal(arrived, tensor)
        assert phase_of(arrived) == phase_of(tensor) // 4 * 4


def test_layouts_tell_apart_what_python_calls_equal() -> None:
    one = Layout.of(flatten({"n": 1}), False)
    assert one.fits({"n": 1}) is not None
    for other in ({"n": True}, {"n": 1.0}, {"m": 1}, {"n": torch.ones(1)}, {"n": None}, (1,), 1):
        assert one.fits(other) is None
    tensor = Layout.of(flatten(torch.ones(2, 3)), False)
    assert tensor.fits(torch.zeros(2, 3)) is not None
    for other in (
        torch.ones(3, 2),
        torch.ones(2, 3).double(),
        torch.ones(2, 3, requires_grad=True),
        (torch.ones(2, 3),),
    ):
        assert tensor.fits(other) is None
    assert Layout.load(one.text, is_known=True).fits({"n": 1}) is not None


def on_a_device(value: Any) -> Layout:
    """The layout that the value would have with its tensors on a device that has a link."""
    content = Layout.of(flatten(value), True).content
    slots = tuple(slot and slot._replace(device="cuda") for slot in content.slots)
    return Layout(content._replace(slots=slots))


ON_A_DEVICE: list[tuple[Any, bool]] = [  # and whether it leaves from its own memory
    (X, True),
    (X[1:3], True),
    (X[:, 3], False),
    (X[:1].expand(9, 12), True),
    ((X, X[1:]), True),
    ((X[0], X.clone()[2:], torch.arange(3)), False),
    ({"a": X[:, ::2], "b": (X, 7), "c": torch.ones(2, dtype=torch.bool)}, False),
]


@pytest.mark.parametrize(("value", "is_lent"), ON_A_DEVICE)
def test_all_tensors_on_a_device_travel_in_one_piece_and_the_frame_has_none_of_them(value: Any, is_lent: bool) -> None:
    """Each would cost a kernel; and a frame of one size lets the next message be of another shape."""
    layout, leaves = on_a_device(value), flatten(value).items
    payload, lender = layout.pack_on_device(leaves)
    assert payload.numel() == layout.device_bytes
    assert layout.frame_bytes == HEADER_BYTES
    assert not layout.directs
    arrived = Layout.load(layout.text, is_known=True)
    memory = arrived.blank_on_device(torch.device("cpu")).copy_(payload)
    built = flatten(arrived.build(Frame(HEADER_BYTES, []).tensor, (), None, memory)).items
    for one, other in zip(leaves, built, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert phase_of(one) == phase_of(other)
        else:
            assert one == other
    assert (lender is not None) is is_lent


def test_what_is_on_the_cpu_stays_in_the_frame_beside_a_device() -> None:
    value = (X, torch.arange(5))
    content = Layout.of(flatten(value), True).content
    slots = tuple(
        slot and slot._replace(device=home) for slot, home in zip(content.slots, ("cuda", "cpu"), strict=True)
    )
    layout = Layout(content._replace(slots=slots))
    frame = Frame(layout.frame_bytes, layout.copies)
    assert layout.pack(value, frame) == []
    payload, lender = layout.pack_on_device(value)
    assert lender is not None
    assert lender.data_ptr() == X.data_ptr()
    x, numbers = layout.build(frame.tensor, (), None, payload.clone())
    assert torch.equal(x, X)
    assert torch.equal(numbers, value[1])
