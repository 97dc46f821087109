"""Documents become the rows of a batch: one document per row, padded; or several, packed.

Packed documents must not see each other. Their positions begin again at 0 with each of them, and that is how models
of transformers know where one ends (they mask what lies before); the built-in GPT does the same. What is left of a row
is a document of padding. `vocabulary` asks the model itself whether it keeps to that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.lengths import by_tokens
from penstock.tools.train.config.settings import Data
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.documents import Document
from penstock.tools.train.loss import IGNORED

PADDING = 0  # the token that fills rows: no target, and nothing that counts sees it
Row = list[Document]


class Padded:
    """One document per row, as wide as the longest of its batch."""

    def __init__(self, *, bare: bool) -> None:
        self._bare = bare  # tokens alone: causal attention needs no mask for padding at the end

    def rows(self, documents: Sequence[Document]) -> list[Row]:
        return [[document] for document in documents]

    def batch(self, rows: Sequence[Row]) -> DataBatch:
        """Make tensors of (rows, tokens); an empty row is padding alone."""
        width = max(1, *(sum(map(len, row)) for row in rows))
        ids, target = _filled(rows, width)
        lengths = torch.tensor([sum(map(len, row)) for row in rows], device="cpu")
        valid = (torch.arange(width, device="cpu") < lengths[:, None]).to(torch.int64)
        valid[:, 0] = 1  # a row of padding alone: a softmax over nothing is nan
        tokens = int(lengths.sum())
        if self._bare:
            return DataBatch((ids,), {}, target, tokens)
        return DataBatch((), {"input_ids": ids, "attention_mask": valid}, target, tokens)


class Packed:
    """As many documents per row as fit."""

    def __init__(self, sequence: int, *, stacked: bool) -> None:
        self.sequence = sequence
        self._stacked = stacked  # positions beside the tokens, for a model that is a sequence of layers

    def rows(self, documents: Sequence[Document]) -> list[Row]:
        """Pack the longest first, each where it leaves the least room."""
        rows: list[Row] = []
        rooms: list[tuple[int, int]] = []  # sorted: what is left of a row, and which
        for document in sorted(documents, key=len, reverse=True):
            place = bisect_left(rooms, (len(document), -1))
            if place < len(rooms):
                room, number = rooms.pop(place)
                rows[number].append(document)
            else:
                room, number = self.sequence, len(rows)
                rows.append([document])
            insort(rooms, (room - len(document), number))
        return rows

    def batch(self, rows: Sequence[Row]) -> DataBatch:
        """Make tensors of (rows, tokens), and positions that begin again with each document."""
        ids, target = _filled(rows, self.sequence)
        positions = torch.empty_like(ids)
        for number, row in enumerate(rows):
            lengths = [len(document) for document in row]
            lengths.append(self.sequence - sum(lengths))
            positions[number] = torch.cat([torch.arange(length, device="cpu") for length in lengths])
        tokens = sum(len(document) for row in rows for document in row)
        if self._stacked:
            return DataBatch((torch.stack([ids, positions], 1),), {}, target, tokens)
        return DataBatch((), {"input_ids": ids, "position_ids": positions}, target, tokens)


Layout = Padded | Packed


def _filled(rows: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(rows), width), PADDING, dtype=torch.int64, device="cpu")
    target = torch.full((len(rows), width), IGNORED, dtype=torch.int64, device="cpu")
    for number, row in enumerate(rows):
        if row:
            inputs = torch.cat([document.inputs for document in row])
            ids[number, : len(inputs)] = inputs
            target[number, : len(inputs)] = torch.cat([document.targets for document in row])
    return ids, target


def split_of(data: Data) -> BatchOptions:
    """Choose how batches are split into microbatches: by rows, or by length where the tokens of one are limited."""
    if data.max_tokens is None:
        return BatchOptions()
    return BatchOptions(
        split=by_tokens(data.max_tokens, lengths="attention_mask", sequences=("input_ids", "attention_mask", "target"))
    )
