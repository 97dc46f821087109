"""The axes that processes stand on, and what is said where they cannot."""

from __future__ import annotations

import pytest

import penstock
from penstock.errors import UsageError
from penstock.parallel.mesh import Axes


def test_a_mesh_needs_processes() -> None:
    with pytest.raises(UsageError, match="pp=2 x dp=2 x tp=1 needs 4 processes, but this process runs"):
        penstock.mesh(pp=2, dp=2)
    with pytest.raises(UsageError, match="only one axis"):
        penstock.mesh(pp=-1, dp=-1)
    with pytest.raises(UsageError, match="dp=0"):
        penstock.mesh(dp=0)
    with pytest.raises(UsageError, match="inner='tp': pass 'dp' or 'pp'"):
        penstock.mesh(inner="tp")  # type: ignore[arg-type]


def test_replicas_need_a_mesh_and_without_one_there_is_one_replica() -> None:
    with pytest.raises(UsageError, match="replicate='ddp' needs mesh="):
        Axes.of(None, "ddp")
    axes = Axes.of(None, None)
    assert [axes.size(name) for name in ("pp", "dp", "tp")] == [1, 1, 1]
    assert axes.index("dp") == 0
