"""Batches of rows: read in windows, shuffled, packed or padded, and resumed at the exact row.

A window is some documents that are shuffled and packed among each other. Where a run stands is thus where its window
begins in the files, and how many rows of the window were used: a checkpoint holds these numbers, and resuming makes the
same window again, whether all documents are in memory or read while training goes on. A batch may span windows, and
epochs; the order of each is drawn from (seed, epoch, window).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ModelError, UsageError
from penstock.rules import is_index
from penstock.runtime.state.randomness import seed_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.documents import Document, Encoder, Tally
from penstock.tools.train.data.layouts import Layout, Packed, Padded, Row
from penstock.tools.train.data.records import Position, RowFile, open_rows, read_rows
from penstock.tools.train.data.tokenizer import has_tokenizer

ORDER, WINDOW = 2, 3  # streams of random numbers
START: Position = (0, 0)
MOST = 2**40  # bytes or rows before a position


class InMemory:
    """Documents that are all there; an epoch goes through them in an order of its own.

    `read`, here and in `Streamed`, yields the documents of each row from a position on, with the position after it.
    """

    def __init__(self, documents: Sequence[Document], seed: int, shuffle: bool) -> None:
        self._documents, self._seed, self._shuffle = documents, seed, shuffle
        digest = hashlib.sha256()
        for document in documents:
            digest.update(bytes(document.inputs.numpy()) + bytes(document.targets.numpy()))
        self.fingerprint = digest.hexdigest()

    def read(self, epoch: int, position: Position) -> Iterator[tuple[list[Document], Position]]:
        order: Iterable[int] = range(len(self._documents))
        if self._shuffle:
            order = _shuffled(len(self._documents), seed_of(self._seed, epoch, 0, ORDER))
        for place, number in enumerate(islice(order, position[1], None), position[1] + 1):
            yield [self._documents[number]], (0, place)


class Streamed:
    """Documents of files that are read as they are needed, in the order of the files."""

    def __init__(self, files: Sequence[RowFile], encoder: Encoder) -> None:
        self._files, self._encoder = files, encoder
        sizes = (file.path.stat().st_size if file.path.is_file() else 0 for file in files)
        names = "\n".join(f"{file.path.name} {size}" for file, size in zip(files, sizes, strict=True))
        self.fingerprint = hashlib.sha256(names.encode()).hexdigest()

    def read(self, epoch: int, position: Position) -> Iterator[tuple[list[Document], Position]]:
        for record, after in read_rows(self._files, position):
            yield self._encoder.encode(record), after


Documents = InMemory | Streamed


def _shuffled(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    return order


class RowBatches:
    """The batches of a run that trains on rows."""

    def __init__(
        self,
        documents: Documents,
        validation: Sequence[Document],
        layout: Layout,
        *,
        rows: int,
        window: int,
        seed: int,
        shuffle: bool,
        longest: int,
        words: str,
        tally: Tally,
    ) -> None:
        self.words, self.changed = words, ""
        self.longest = longest  # tokens that a document may have: under streaming, they are not known yet
        self.limit: int | None = None  # how many tokens the model knows
        self._tally = tally
        self._documents, self._layout = documents, layout
        self._rows, self._window, self._seed, self._shuffle = rows, window, seed, shuffle
        self._validation = layout.rows(validation)
        self._epoch, self._number, self._begin = 0, 0, START  # this window: its epoch, its number there, its place
        self._made: list[Row] | None = None  # The rows of this window, once they are made.
        self._used = 0  # Rows of this window that were used.
        self._after = START  # The place where this window ends.
        self._reader: Iterator[tuple[list[Document], Position]] | None = None
        self._taken = 0  # batches
        self._ahead: tuple[dict[str, Any], DataBatch] | None = None  # a batch that was looked at, and the state before

    def first(self) -> DataBatch:
        """Return the next batch to look at, without taking it."""
        if self._ahead is None:
            before = self.state_dict()
            self._ahead = before, self._layout.batch([self._row() for _ in range(self._rows)])
        return self._ahead[1]

    def at(self, number: int) -> DataBatch:
        """Return the next batch: `number` must be the count of those before it."""
        if number != self._taken:
            raise ModelError(f"{self.words}: batch {number} was asked for, batch {self._taken} is next")
        batch = self.first()
        self.check_limit()
        self._ahead = None
        self._taken += 1
        return batch

    def check_limit(self) -> None:
        """Raise UsageError where a row that was read so far has a token that the model does not know."""
        if self.limit is not None and self._tally.largest >= self.limit:
            raise UsageError(
                f"the rows of data.source hold the token {self._tally.largest}; the model knows {self.limit}, 0 to "
                f"{self.limit - 1}; take the tokenizer that was saved with the model (data.tokenizer), or a model with "
                f"random weights of that size"
            )

    def validation(self, number: int) -> DataBatch | None:
        """Return rows that are not trained on, in their order; rows that do not count fill the last batch."""
        rows = self._validation[number * self._rows : (number + 1) * self._rows]
        return self._layout.batch([*rows, *[[]] * (self._rows - len(rows))]) if rows else None

    # -- windows

    def _row(self) -> Row:
        if self._made is None:
            self._make()
        while self._made is None or self._used >= len(self._made):
            self._next_window()
            self._make()
        self._used += 1
        return self._made[self._used - 1]

    def _make(self) -> None:
        """Make the rows of the window that begins at `_begin`: none at the end of an epoch."""
        if self._reader is None:
            self._reader = self._documents.read(self._epoch, self._begin)
        found: list[Document] = []
        self._after = self._begin
        for documents, after in self._reader:
            found += documents
            self._after = after
            if len(found) >= self._window:
                break
        rows = self._layout.rows(found)
        if self._shuffle:
            order = _shuffled(len(rows), seed_of(self._seed, self._epoch, self._number, WINDOW))
            rows = [rows[number] for number in order]
        self._made = rows

    def _next_window(self) -> None:
        if self._made:
            self._number, self._begin = self._number + 1, self._after
        elif self._begin == START:
            raise UsageError(self._tally.nothing(self.words))
        else:
            self._epoch, self._number, self._begin, self._reader = self._epoch + 1, 0, START, None
        self._made, self._used = None, 0

    # -- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the window that the run is in, and how much of it was used."""
        if self._ahead is not None:
            return self._ahead[0]
        return {
            "taken": self._taken,
            "epoch": self._epoch,
            "window": self._number,
            "begin": list(self._begin),
            "used": self._used,
            "fingerprint": self._documents.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the row after the last one that was used."""
        file, place = state["begin"]
        numbers = [state[name] for name in ("taken", "epoch", "window", "used")]
        if not all(is_index(each, MOST) for each in (*numbers, file, place)):
            raise ValueError("a position has whole numbers, of which none is negative")
        self._taken, self._epoch, self._number, self._used = numbers
        self._begin = file, place
        self._made = self._reader = self._ahead = None
        if state["fingerprint"] != self._documents.fingerprint:
            self.changed = "the rows are not those of the checkpoint (other files, or other keys of [data])"


# -- from a configuration


def open_row_batches(config: TrainConfig) -> RowBatches:
    """Open the batches of `data.source`, where that names files of rows."""
    data = config.data
    encoder = Encoder(data, near=_tokenizer_of_model(config))
    files = open_rows("data.source", data.source, data.options)
    layout = _layout(config)
    held_back = _read_all(open_rows("data.validation_source", data.validation_source, {}), encoder)
    if data.streaming:
        documents: Documents = Streamed(files, encoder)
        words, longest = f"rows of {_names(files)}, read while training goes on", data.sequence
    else:
        found = _read_all(files, encoder)
        if not data.validation_source:
            least = 1 if data.validation and config.evaluation.every and len(found) > 1 else 0
            cut = len(found) - max(least, int(len(found) * data.validation))
            found, held_back = found[:cut], found[cut:]
        documents = InMemory(found, config.seed, data.shuffle)
        words, longest = _summary(files, found, held_back, encoder, layout), max(map(len, found), default=0)
    return RowBatches(
        documents,
        held_back,
        layout,
        rows=data.batch // config.training.accumulate,
        window=data.window,
        seed=config.seed,
        shuffle=data.shuffle,
        longest=longest,
        words=words,
        tally=encoder.tally,
    )


def _tokenizer_of_model(config: TrainConfig) -> str:
    """Return the folder of the model, if it has a tokenizer."""
    folder = config.model.source.removeprefix(HUGGINGFACE)
    return folder if folder != config.model.source and has_tokenizer(Path(folder)) else ""


def _layout(config: TrainConfig) -> Layout:
    is_gpt = config.model.source == "gpt"
    return Packed(config.data.sequence, stacked=is_gpt) if config.data.packing else Padded(bare=is_gpt)


def _read_all(files: Sequence[RowFile], encoder: Encoder) -> list[Document]:
    return [document for record, _ in read_rows(files) for document in encoder.encode(record)]


def _names(files: Sequence[RowFile]) -> str:
    return str(files[0].path) if len(files) == 1 else f"{len(files)} files from {files[0].path} to {files[-1].path}"


def _summary(
    files: Sequence[RowFile],
    documents: Sequence[Document],
    validation: Sequence[Document],
    encoder: Encoder,
    layout: Layout,
) -> str:
    data, tokens, rows = encoder.options, sum(map(len, documents)), len(layout.rows(documents))
    text = f"{len(documents):,} documents with {tokens:,} tokens of {_names(files)}, {len(validation):,} for validation"
    if isinstance(layout, Packed) and documents:
        text += f"; packed into {rows:,} rows of {data.sequence}, {tokens / (rows * data.sequence):.0%} filled"
    text += f"; an epoch is {rows / data.batch:,.1f} steps" if rows else ""
    rest = encoder.tally.text(data.sequence)
    return f"{text}; {rest}" if rest else text
