"""Values that have rows and are no tensors: packed sequences, and the block masks of flex attention.

Their tensors must not be cut one by one: a packed sequence has its rows one after the other in time, and a block mask
asks a function about rows by their number in the whole batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

FLEX = "torch.nn.attention.flex_attention"  # slow to import; who has a mask of it has imported it


def is_rowed(value: Any) -> bool:
    """Return whether it is one of them."""
    return isinstance(value, PackedSequence) or _is_block_mask(value)


def _is_block_mask(value: Any) -> bool:
    flex = sys.modules.get(FLEX)
    return flex is not None and isinstance(value, flex.BlockMask)


def rows_of_rowed(value: Any) -> int | None:
    """Return how many rows it has; None for a mask that holds for any row."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    rows = int(value.kv_num_blocks.shape[0])
    return None if rows == 1 else rows


def cut_rowed(value: Any, indices: Sequence[Tensor]) -> list[Any]:
    """Cut it into one piece for each list of rows."""
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return [
            pack_padded_sequence(
                padded[index.to(padded.device)][:, : int(lengths[index].max())],
                lengths[index],
                batch_first=True,
                enforce_sorted=False,
            )
            for index in indices
        ]
    return [_rows_of_mask(value, index) for index in indices]


def _rows_of_mask(mask: Any, index: Tensor) -> Any:
    index = index.to(mask.kv_num_blocks.device)

    def of_these_rows(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found: Tensor = mask.mask_mod(index[row], head, query, key)
        return found

    def some(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[index]

    return type(mask).from_kv_blocks(
        some(mask.kv_num_blocks),
        some(mask.kv_indices),
        some(mask.full_kv_num_blocks),
        some(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=of_these_rows,
        seq_lengths=mask.seq_lengths,
    )
