"""Values that have rows and are no tensors are cut with the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import ModelError
from penstock.runtime.batch.lengths import PlanSplitter
from penstock.runtime.batch.microbatch import split_batch


def test_block_masks_are_cut_with_their_rows() -> None:
    """A block mask asks about rows by their number in the batch: a piece must ask about its own."""
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    documents = torch.randint(0, 3, (5, 256), generator=torch.Generator().manual_seed(0)).sort(1).values
    lengths = torch.tensor([256, 3, 256, 200, 2])

    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents[row, query] == documents[row, key]

    mask = create_block_mask(same_document, 5, 1, 256, 256, device="cpu")
    causal = create_block_mask(lambda row, head, query, key: query >= key, None, None, 256, 256, device="cpu")
    whole = create_mask(same_document, 5, 1, 256, 256, device="cpu")
    x = torch.zeros(5, 256)
    plan = penstock.by_tokens().plan((x,), {"lengths": lengths}, 3, True)
    assert plan is not None
    splitters: list[Any] = [None, PlanSplitter(plan, {}, {})]
    for splitter, rows in zip(splitters, ([[0, 1], [2, 3], [4]], plan.rows), strict=True):
        pieces = split_batch(3, (x,), {"mask": mask, "causal": causal}, None, {}, {}, splitter=splitter).kwargs
        assert all(piece["causal"] is causal for piece in pieces)
        for piece, index in zip(pieces, rows, strict=True):
            found = create_mask(piece["mask"].mask_mod, len(index), 1, 256, 256, device="cpu")
            assert torch.equal(found, whole[list(index)])
            assert torch.equal(piece["mask"].to_dense(), mask.to_dense()[list(index)])
    with pytest.raises(ModelError, match="'mask' has 5 rows, but argument 0 has 4"):
        split_batch(2, (x[:4],), {"mask": mask}, None, {}, {})
