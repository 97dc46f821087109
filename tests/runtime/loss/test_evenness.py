"""Entries count alike in all replicas, as in all microbatches of one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import on_processes
from runtime.loss.asked import WIDTH, batch, masked
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, PenstockError
from penstock.runtime.loss.evenness import EntryCount, TermCounts, compare_replicas


def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return masked(output, *target)


def trained(pp: int, overlaps: bool, rows: list[int]) -> list[str]:
    """Two replicas, whose masks are even in each of them, and in the last step not alike."""
    mesh = penstock.mesh(pp=pp, dp=2)
    here = mesh.get_local_rank("dp")
    share = slice(sum(rows[:here]), sum(rows[: here + 1]))
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH).double() for _ in range(pp)]
    plain, said, given, wanted = copy.deepcopy(nn.Sequential(*stages)), [], [], []
    for step in range(3):
        x, y, mask = batch(sum(rows), seed=step)
        mask[:] = True
        mask[rows[0] :, 2:] = step < 2
        given.append((x[share], (y[share], mask[share])))
        wanted.append(masked(plain(x), y, mask).item())
    with penstock.Pipeline(stages, microbatches=2, loss_fn=loss_fn, mesh=mesh, timeout=60) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        results = pipe.train_steps(given, optimizer) if overlaps else (pipe.step(x, target=t) for x, t in given)
        try:
            for number, result in enumerate(results):
                assert result.loss is not None
                said.append("right" if result.loss.item() == pytest.approx(wanted[number], rel=1e-12) else "wrong")
        except PenstockError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("rows", [[4, 4], [6, 4]])
def test_masks_that_are_even_in_each_replica_and_not_alike_are_refused_in_that_step(rows: list[int]) -> None:
    """Each replica was compared with itself only: gradients were off by 0.04 to 0.09 in silence."""
    for said in on_processes(2, trained, 1, False, rows):
        assert said[:2] == ["right", "right"]
        assert "the losses of replicas 0 and 1 are means over" in said[2]


@pytest.mark.slow
def test_all_ranks_of_all_replicas_hear_of_it_where_steps_overlap() -> None:
    for said in on_processes(4, trained, 2, True, [4, 4]):
        assert "the losses of replicas 0 and 1 are means over" in said[-1]
        assert set(said[:-1]) == {"right"}


def counts(values: list[float], shares: list[float], rows: list[float], **more: Any) -> TermCounts:
    counted = {
        number: EntryCount(value, share, share, row, int(row) * 5)
        for number, (value, share, row) in enumerate(zip(values, shares, rows, strict=True))
    }
    kind = {"is_weighted": False, "of_rows": True, "is_read": True, "slack": 1e-12, "measure": "rows", "by_rows": True}
    return TermCounts(counted, **{**kind, **more})


def test_entries_count_alike_where_values_and_shares_make_up_for_each_other() -> None:
    assert counts([1 / 3, 1 / 2], [0.6, 0.4], [3, 2]).unevenness() is None
    assert counts([1 / 2, 1 / 2], [0.6, 0.4], [3, 2]).unevenness() is not None
    assert counts([1.0, 1.0], [0.6, 0.4], [3, 2], is_weighted=True).unevenness() is None
    assert counts([1.0, 1.0], [0.6, 0.4], [3, 2], is_read=False).unevenness() is None
    assert counts([1.0, 0.5], [0.6, 0.4], [3, 2], is_read=False).unevenness() is not None
    assert counts([1.0, 1.0], [0.6, 0.4], [3, 2], of_rows=False).unevenness() is None
    what, remedy = counts([1.0, 1.0], [0.6, 0.4], [3, 2]).unevenness() or ("", "")
    assert "are sums, but count as 0.6 and 0.4" in what
    assert "reduction='sum'" in remedy


def test_replicas_with_other_terms_are_not_compared() -> None:
    one, other = (counts([value], [0.5], [2]).for_replicas() for value in (1 / 2, 1 / 4))
    weighted = counts([1 / 4], [0.5], [2], is_weighted=True).for_replicas()
    compare_replicas([[one], [one]])
    compare_replicas([[one], []])
    compare_replicas([[one], [weighted]])
    with pytest.raises(ModelError, match="replicas 0 and 1 are means over 2 and 4 entries"):
        compare_replicas([[one], [other]])
