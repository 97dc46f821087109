"""Plain values through torch's collectives: every member's, in order, whatever their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from processes import on_processes

from penstock.errors import UsageError
from penstock.runtime.messages.collective import all_gather


def gathered() -> list[Any]:
    rank = dist.get_rank()
    found = [all_gather({"rank": rank, "text": "x" * 1000 * rank}, dist.group.WORLD)]
    with pytest.raises(UsageError, match="only plain values"):
        all_gather(object(), dist.group.WORLD)  # before anything is sent, so that nobody waits
    return found


@pytest.mark.slow
def test_every_member_gets_every_members_value() -> None:
    expected = [[{"rank": rank, "text": "x" * 1000 * rank} for rank in range(2)]]
    assert on_processes(2, gathered) == [expected, expected]
