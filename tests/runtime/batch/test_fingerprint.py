"""Batches are told apart by their numbers, and rounding is not taken for another batch."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.batch.comparison import different_batches, unlike
from penstock.runtime.batch.fingerprint import SAMPLE, WHOLE, fingerprint_batch

LARGE = 3 * WHOLE  # numbers


def difference(one: Any, other: Any, turn: int = 0, whole: bool = True) -> str:
    """What two ranks say of a batch of which each has one."""
    seen = [fingerprint_batch((each,), {}, None, {}, turn, whole) for each in (one, other)]
    odd = unlike([each.fingerprint() for each in seen])
    return different_batches([each.details(odd) for each in seen])


def same(one: Any, other: Any, turn: int = 0, whole: bool = True) -> bool:
    return not difference(one, other, turn, whole)


@pytest.mark.parametrize("whole", [True, False])
def test_other_rows_are_seen_and_rounding_is_not(whole: bool) -> None:
    torch.manual_seed(0)
    for target in (torch.randn(100, 7), torch.randn(1000, 70)):
        assert same(target, target.clone(), whole=whole)
        assert same(target, target * (1 + 1e-6), whole=whole)
        assert same({"a": target.bfloat16()}, {"a": (target * 1.003).bfloat16()}, whole=whole)
        assert same(target.t(), target.t().contiguous(), whole=whole)
        assert not same(target, target.flip(0), whole=whole)
        assert not same(target, target.double(), whole=whole)
        assert not same(target, target[:50], whole=whole)
        assert not same(target + 1j, target - 1j, whole=whole)


def test_whole_numbers_must_be_equal_to_the_last_one() -> None:
    labels = torch.arange(LARGE)
    other = labels.clone()
    other[4321] += 1
    other[4322] -= 1
    assert same((labels, labels > 3), (labels.clone(), labels > 3))
    assert not same(labels, other)
    assert not same(labels[:5000], other[:5000], whole=False)
    assert not same(labels > 3, labels > 4)
    assert same(labels[:0], labels[:0])


def test_in_later_steps_a_large_tensor_is_compared_by_its_sum_and_by_other_numbers_in_each() -> None:
    labels = torch.zeros(LARGE, dtype=torch.int64)
    other = labels.clone()
    other[4321] += 1
    assert not same(labels, other, whole=False)
    other[4322] -= 1  # the sum is as it was
    found = [not same(labels, other, turn, whole=False) for turn in range(LARGE // SAMPLE)]
    assert found.count(True) == 2  # each number has its turn


def test_pictures_with_a_margin_of_zeros_are_told_apart() -> None:
    """Whose first rows and columns are all the same."""
    one, other = torch.zeros(2, 8, 3, 64, 64).unbind()
    one[..., 16:-16, 16:-16].normal_()
    other[..., 16:-16, 16:-16].normal_()
    assert not same(one, other, whole=False)


def test_one_number_that_is_none_shows_wherever_it_is() -> None:
    for size in (8, LARGE):
        for bad in (torch.nan, torch.inf):
            values = torch.randn(size, dtype=torch.bfloat16)
            other = values.clone()
            other[size // 2 + 1] = bad
            assert not same(values, other, whole=False)
            assert not same(values, other)
            assert same(other, other.clone(), whole=False)


def test_small_tensors_are_compared_number_by_number() -> None:
    values = torch.randn(64, 16)
    other = values.clone()
    other[31, 7] += 1
    said = difference(values, other, whole=False)
    assert said.startswith("the ranks were given different batches (argument 0: rank 0 has float32 (64, 16) with ")


def test_plain_values_count_and_what_cannot_be_compared_does_not() -> None:
    assert same({"a": 3, "b": [1, 2]}, {"b": [1, 2], "a": 3})
    assert "argument 0['a']: rank 0 has 3; rank 1 has 4" in difference({"a": 3}, {"a": 4})
    assert not same({"a": 3}, {"b": 3})
    assert not same([1, 2], [2, 1])
    assert not same((torch.ones(2), 1), (torch.ones(2), 2))
    assert not same((torch.ones(2),), (torch.ones(2), torch.ones(2)))
    assert "float with 0.5; rank 1 has float with 0.6" in difference(0.5, 0.6)
    assert same(0.5, 0.5 + 1e-9)
    assert not same("a" * 1000, "a" * 999 + "b")
    assert not same(numpy.arange(3), numpy.arange(3) + 1)
    assert same(numpy.arange(3), numpy.arange(3))
    assert same(object(), object())
    assert same(torch.ones(2, device="meta"), torch.zeros(2, device="meta"))
    assert not same(torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn))
    assert not same(torch.ones(2, device="meta"), torch.ones(3, device="meta"))
    assert not same(penstock.Shared(torch.ones(2)), penstock.Shared(torch.zeros(2)))
    assert same(nn.Parameter(torch.ones(2)), torch.ones(2))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    assert same(packed, nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)]))
    assert not same(packed, nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]))


def test_a_batch_is_seen_as_it_was_given_and_not_as_a_stage_has_changed_it() -> None:
    for size in (8, LARGE):
        values = torch.randn(size)
        seen = fingerprint_batch((values,), {}, None, {}, 0, False)
        before = fingerprint_batch((values.clone(),), {}, None, {}, 0, False)
        values.zero_()
        assert seen.fingerprint() == before.fingerprint()
