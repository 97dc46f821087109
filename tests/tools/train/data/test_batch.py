"""A batch of a run, and the part of it that each replica has."""

from __future__ import annotations

import torch


def test_a_batch_is_shared_by_replicas_row_by_row() -> None:
    from penstock.tools.train.data.batch import DataBatch

    batch = DataBatch((torch.arange(8).reshape(4, 2),), {"mask": torch.ones(4), "scale": 2.0}, torch.arange(4), 8)
    halves = [batch.share(number, 2) for number in range(2)]
    assert [half.target.tolist() for half in halves] == [[0, 1], [2, 3]]
    assert [half.kwargs["mask"].shape[0] for half in halves] == [2, 2]
    assert [half.kwargs["scale"] for half in halves] == [2.0, 2.0]
    assert halves[0].tokens == 8
    assert batch.share(0, 1) is batch
