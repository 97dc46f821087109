"""Batches are told apart by their numbers, and rounding is not taken for another batch."""

from __future__ import annotations

import torch

from penstock.runtime.fingerprint import fingerprint


def same(one: object, other: object) -> bool:
    first, second = fingerprint(one), fingerprint(other)
    assert first is not None
    return first.fits(second)


def test_other_rows_are_seen_and_rounding_is_not() -> None:
    torch.manual_seed(0)
    target = torch.randn(100, 7)
    assert same(target, target.clone())
    assert same(target, target * (1 + 1e-6))
    assert same({"a": target.bfloat16()}, {"a": (target * 1.003).bfloat16()})
    assert same(target.t(), target.t().contiguous())
    assert not same(target, target.flip(0))
    assert not same(target, target.double())
    assert not same(target, target[:50])
    assert not same(target + 1j, target - 1j)


def test_whole_numbers_must_be_equal_to_the_last_one() -> None:
    labels = torch.arange(5000)
    other = labels.clone()
    other[4321] += 1
    assert same((labels, labels > 3), (labels.clone(), labels > 3))
    assert not same(labels, other)
    assert not same(labels > 3, labels > 4)
    assert same(labels[:0], labels[:0])


def test_what_has_no_plain_tensor_has_none() -> None:
    assert fingerprint({"a": 3, "b": None}) is None
    assert fingerprint(torch.ones(2, device="meta")) is None
