"""Rows become documents: tokens, and which of them are learned.

A document of n tokens takes n - 1 places of a batch's row: each token but the last is an input, and its target is the
next one. What rows hold is seen from their columns; what does not fit is cut, divided, dropped or refused, as the
configuration says, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.tools.train.config.settings import Data
from penstock.tools.train.data.chat import ASSISTANT, check_chats, encode_chat, roles_in
from penstock.tools.train.data.records import Record
from penstock.tools.train.data.tokenizer import Tokenizer, open_tokenizer
from penstock.tools.train.loss import IGNORED

MOST_TOKEN = 2**31 - 1  # tokens are kept as int32
COLUMNS = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "input_ids": ("input_ids",),
    "text": ("text",),
}  # The columns of each format; where several fit, the first counts.


@dataclass(frozen=True, slots=True)
class Document:
    """The inputs of one document and their targets, of the same length."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.numel()

    def part(self, begin: int, end: int) -> Document:
        return Document(self.inputs[begin:end], self.targets[begin:end])

    @property
    def is_learned(self) -> bool:
        """Whether any of its tokens is."""
        return bool((self.targets != IGNORED).any())


@dataclass
class Tally:
    """What became of the rows that were read."""

    rows: int = 0
    cut: int = 0
    divided: int = 0
    dropped: int = 0
    empty: int = 0
    largest: int = -1  # the largest token

    def text(self, sequence: int) -> str:
        """Describe it for the user; empty where nothing happened to any row."""
        long = f"of more than {sequence} tokens (data.sequence)"
        counts = {
            f"truncated, being {long}": self.cut,
            f"divided, being {long}": self.divided,
            f"dropped, being {long}": self.dropped,
            "dropped, having nothing to learn": self.empty,
        }
        return "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)

    def nothing(self, words: str) -> str:
        """Describe that no row is left to train on."""
        remedy = "set a larger data.sequence, or data.too_long" if self.dropped else "name files with rows to train on"
        return f"{words}: none of the rows that were read ({self.rows:,}) has anything to learn; {remedy}"


@dataclass
class Encoder:
    """Rows to documents, by the keys of [data]."""

    options: Data
    tally: Tally = field(default_factory=Tally)
    near: str = ""  # a folder that has a tokenizer
    _format: str = ""

    def __post_init__(self) -> None:
        known = [name for names in COLUMNS.values() for name in names]
        strange = [name for name in self.options.columns if name not in known]
        if strange:
            raise UsageError(
                f"data.columns names {strange[0]!r}; the columns that can have other names are {', '.join(known)}"
            )
        if self.options.format != "auto":
            self._take(self.options.format)

    @property
    def tokenizer(self) -> Tokenizer:
        if not self.options.tokenizer:
            example = f'data.tokenizer = "{self.near}"' if self.near else "data.tokenizer, a folder with a tokenizer"
            raise UsageError(f"rows of {self._format} need {example}; rows of input_ids need none")
        return open_tokenizer(self.options.tokenizer, self.options.end)

    def encode(self, record: Record) -> list[Document]:
        """Return the documents of one row: one, several where a long one is divided, or none."""
        if not self._format:
            self._take(self._found(record))
        ids, learned = self._tokens(record)
        self.tally.rows += 1
        self.tally.largest = max(self.tally.largest, *ids, -1)
        if not any(learned[1:]):
            self._without_targets(record, len(ids))
            return []
        tokens = torch.tensor(ids, dtype=torch.int32, device="cpu")
        targets = torch.tensor(ids[1:], dtype=torch.int32, device="cpu")
        targets[~torch.tensor(learned[1:], device="cpu")] = IGNORED
        return list(self._fitted(Document(tokens[:-1], targets), record))

    # -- what a row holds

    def _name(self, column: str) -> str:
        return str(self.options.columns.get(column, column))

    def _found(self, record: Record) -> str:
        for name, columns in COLUMNS.items():
            if all(self._name(column) in record.values for column in columns):
                return name
        others = [name for name, value in record.values.items() if isinstance(value, str)]
        remedy = f'data.columns = {{ text = "{others[0] if others else "..."}" }} says which column is meant'
        if len(others) == 2:
            remedy = (
                f'set data.columns = {{ prompt = "{others[0]}", completion = "{others[1]}" }} if they are these two'
            )
        if "conversations" in record.values:
            remedy = (
                'write "conversations" of {from, value} as "messages" of {role, content}; where they have role and '
                'content already, set data.columns = { messages = "conversations" }'
            )
        absent = [named for named in self.options.columns.values() if named not in record.values]
        if absent:
            remedy = f"data.columns names {absent[0]!r}, which is not there"
        raise UsageError(
            f"{record.place} has the columns {', '.join(record.values) or 'none'}; rows need messages, prompt and "
            f"completion, input_ids, or text; {remedy}"
        )

    def _take(self, name: str) -> None:
        self._format = name
        if name == "messages":
            check_chats(self.tokenizer)

    def _column(self, record: Record, column: str, kind: type, words: str) -> Any:
        name = self._name(column)
        if name not in record.values:
            raise UsageError(
                f"{record.place} has no column {name!r}; it has {', '.join(record.values) or 'none'}, and the rows "
                f"before it, or data.format, say that rows hold {self._format}"
            )
        value = record.values[name]
        if not isinstance(value, kind):
            shown = "nothing" if value is None else f"a {type(value).__name__}"
            raise UsageError(f"{record.place}: {name} is {shown}; it takes {words}")
        return value

    def _tokens(self, record: Record) -> tuple[list[int], list[bool]]:
        """Return the tokens of a row, and for each whether it is learned."""
        answers = self.options.loss_on == "answers"
        if self._format == "messages":
            messages = self._column(record, "messages", list, "a list of {role, content}")
            return encode_chat(self.tokenizer, messages, answers, record.place)
        if self._format == "prompt":
            prompt, answer = (self._column(record, name, str, "a text") for name in COLUMNS["prompt"])
            begun = self.tokenizer.begun(self.tokenizer.encode(prompt))
            ended = self.tokenizer.ended(self.tokenizer.encode(answer, special=False)) if answer else []
            return begun + ended, [not answers] * len(begun) + [True] * len(ended)
        if self._format == "input_ids":
            ids = self._column(record, "input_ids", list, "a list of whole numbers")
            if ids and ({*map(type, ids)} != {int} or min(ids) < 0 or max(ids) > MOST_TOKEN):
                raise UsageError(f"{record.place}: input_ids takes whole numbers from 0 to {MOST_TOKEN:,}")
        else:
            text = self._column(record, "text", str, "a text")
            ids = self.tokenizer.ended(self.tokenizer.encode(text)) if text.strip() else []
        return ids, [True] * len(ids)

    # -- what does not fit

    def _without_targets(self, record: Record, count: int) -> None:
        self.tally.empty += 1
        if self.options.empty == "error":
            why = "no answer in it" if count > 1 else f"{count} tokens, and one needs another to predict"
            if count > 1 and self._format == "messages":
                roles = roles_in(record.values[self._name("messages")])
                why += f" (its roles are {', '.join(roles)}; answers are those of {ASSISTANT})"
            raise UsageError(f'{record.place} has nothing to learn: {why}; data.empty = "drop" leaves such rows out')

    def _fitted(self, document: Document, record: Record) -> Iterator[Document]:
        length, rule = self.options.sequence, self.options.too_long
        if len(document) <= length:
            yield document
            return
        if rule == "error":
            raise UsageError(
                f"{record.place} has {len(document) + 1} tokens, and one row takes {length + 1} (data.sequence and one "
                f'to predict); data.too_long = "truncate", "split" or "drop" takes such rows'
            )
        if rule == "drop":
            self.tally.dropped += 1
            return
        kept = document.part(0, length)
        pieces = [kept]
        if rule == "split":
            self.tally.divided += 1
            begins = range(0, len(document), length)
            pieces = [document.part(begin, begin + length) for begin in begins]
        elif kept.is_learned:
            self.tally.cut += 1
        else:  # all of its answers come later
            self.tally.dropped += 1
        yield from (piece for piece in pieces if piece.is_learned)
