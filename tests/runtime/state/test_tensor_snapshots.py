"""Tensors are put back bit for bit, whatever was done to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.runtime.state import tensor_snapshots
from penstock.runtime.state.tensor_snapshots import Contents


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def other_data(tensor: Tensor) -> None:
    tensor.data = torch.zeros(2, 2, dtype=torch.float64)


KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.arange(30.0).view(5, 6),
    "one row in many places": lambda: torch.arange(6.0).expand(5, 6),
    "with gaps": lambda: torch.arange(30.0).view(5, 6)[:, :2],
    "transposed": lambda: torch.arange(30.0).view(5, 6).t(),
    "zero": lambda: torch.zeros(()),
    "no number": lambda: torch.full((3,), torch.nan),
    "empty": lambda: torch.empty(0, 3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.full((3,), 1 + 2j).conj(),
    "true or false": lambda: torch.eye(4) > 0,
    "bfloat16": lambda: torch.arange(8.0).bfloat16(),
    "channels last": lambda: torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "in a larger storage": lambda: torch.arange(30.0)[3:9],
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.view(-1)[:1].fill_(7) if tensor.is_contiguous() else tensor[:1].zero_(),
    "past its version": lambda tensor: torch.atleast_1d(tensor.data)[..., :1].zero_(),
    "to another sign": lambda tensor: tensor[...].neg_() if tensor.dtype is torch.float32 else None,
    "other memory": lambda tensor: tensor.set_(torch.zeros(2).to(tensor.dtype)),
    "other data": other_data,
    "less of it": lambda tensor: tensor.resize_(1) if tensor.is_contiguous() and tensor.numel() else None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_done_to_a_tensor_is_undone(kind: str) -> None:
    for how, write in WRITES.items():
        tensor = KINDS[kind]()
        if kind == "one row in many places" and how == "to another sign":
            continue  # torch refuses that by itself
        if kind == "conjugated" and how in ("other memory", "other data"):
            continue
        before, place = tensor.clone(), (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        kept = Contents()
        for _ in range(2):  # the second time into the same memory
            kept.take([tensor, tensor])
        write(tensor)
        kept.put_back()
        assert (kept.lost, how) == ([], how)
        assert (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == place, how
        torch.testing.assert_close(tensor, before, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(tensor.real), torch.signbit(before.real)) or tensor.dtype is torch.bool, how


def test_tensors_that_are_not_plain_memory() -> None:
    sparse, kept = torch.eye(3).to_sparse(), Contents()
    kept.take([sparse, torch.empty(3, device="meta")])
    sparse.zero_()
    kept.put_back()
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    ones = inference()
    kept.take([ones])
    with torch.inference_mode():
        ones.zero_()
    kept.put_back()
    assert torch.equal(ones, torch.ones(4))


def test_a_large_tensor_that_does_not_change_has_no_copy_and_is_missed_if_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_snapshots, "LARGE_BYTES", 64)
    table, moving, kept = torch.zeros(100), torch.zeros(100), Contents()
    for _ in range(2):
        kept.take([table, moving])
        moving.data.add_(1)  # past its version, and yet it is seen to change
        kept.left_alone()
    kept.take([table, moving])
    table.add_(1)
    moving.add_(1)
    kept.put_back()
    assert [id(lost) for lost in kept.lost] == [id(table)]
    assert table[0] == 1
    assert moving[0] == 2
    table.zero_()  # between steps: it is copied anew
    kept.take([table])
    table.add_(1)
    kept.put_back()
    assert kept.lost == []
    assert table[0] == 0
