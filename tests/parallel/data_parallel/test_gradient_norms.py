"""The norm of gradients over links: each number is counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.parallel.data_parallel.gradient_norms import gather_over, spread_norm


class Link:
    """A link to a member that says the same."""

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]

    def all_gather(self, call: str, value: Any) -> list[Any]:
        return [value, value]


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_what_every_member_has_whole_is_counted_once(order: float) -> None:
    gradients = [torch.randn(3), torch.randn(2, 2)]
    wanted = torch.nn.utils.get_total_norm(gradients, order)
    links: Any = {"dp": Link(), "tp": Link()}
    for some in ({}, links):
        found = spread_norm(some, gradients, order, None)
        assert found == (pytest.approx(wanted.item()), torch.float32)
        assert spread_norm(some, [], order, None) is None
    assert gather_over(links, "call", 1) == [1] * 4
