"""What the tokens of a trained model mean: bytes, or a tokenizer's words."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import UsageError
from penstock.files import TOKENIZER_FILES
from penstock.train.config.settings import TrainConfig


class Words(Protocol):
    """Text to tokens and back. `end` is the token after which nothing more is written."""

    end: int | None

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""

    def reader(self) -> Reader:
        """What turns tokens into text as they come."""


class Reader(Protocol):
    """Tokens in, text out: what has become readable with each token."""

    def add(self, token: int) -> str:
        """The text that this token adds."""

    def finish(self) -> str:
        """What is left."""


class Bytes:
    """Every token is a byte."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape") or b"\n")

    def reader(self) -> Reader:
        return _ByteReader()


class _ByteReader:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class Tokens:
    """The tokens of a tokenizer of transformers, from its folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # slow to load

        try:
            self._own: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError, ImportError, KeyError) as error:
            raise UsageError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}") from None
        self.end: int | None = self._own.eos_token_id

    def encode(self, text: str) -> list[int]:
        found: list[int] = self._own(text)["input_ids"]
        found = found[:-1] if found and found[-1] == self.end else found  # something follows
        if found:
            return found
        begin = self._own.bos_token_id if self._own.bos_token_id is not None else self.end
        if begin is None:
            raise UsageError("an empty prompt needs a token for the beginning of a text, and there is none: give one")
        return [begin]

    def reader(self) -> Reader:
        return _TokenReader(self._own)


class _TokenReader:
    """A token may be a part of a character, so text is written once it is certain."""

    def __init__(self, tokenizer: Any) -> None:
        self._own = tokenizer
        self._tokens: list[int] = []
        self._written = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._new(text)

    def finish(self) -> str:
        return self._new(self._text())

    def _text(self) -> str:
        return str(self._own.decode(self._tokens, skip_special_tokens=True))

    def _new(self, text: str) -> str:
        new, self._written = text[self._written :], len(text)
        return new


def words_of(config: TrainConfig, origin: Mapping[str, Any] | None) -> Words:
    """What a run's tokens mean: by its tokenizer, else by that of the model's folder, else as bytes."""
    named = getattr(config.data, "tokenizer", "") or (origin or {}).get("folder", "")
    folder = Path(named) if named else None
    if folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES):
        return Tokens(folder)
    if config.data.tokens in ("bytes", "uint8"):
        return Bytes()
    raise UsageError(
        f"data.tokens was {config.data.tokens}, and nothing says what these numbers mean; text can be written where a "
        f"tokenizer is in the model's folder, or where tokens are bytes"
    )
