"""What the tokens of a trained model mean: bytes, or a tokenizer's words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import TOKENIZER_FILES
from penstock.errors import UsageError
from penstock.tools.train.config.paths import holds_rows
from penstock.tools.train.config.settings import TrainConfig


class ByteCodec:
    """Every token is a byte. `end`, here and in the other codec, is the token after which nothing more is written."""

    end: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape") or b"\n")

    def encode_question(self, text: str) -> list[int]:
        raise UsageError("--chat needs a tokenizer with a chat template, and this model reads bytes; give --prompt")

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class TokenizerCodec:
    """The tokens of a tokenizer, from its folder or file."""

    def __init__(self, path: str, end: str) -> None:
        from penstock.tools.train.data.tokenizer import open_tokenizer  # needs a library, and may load transformers

        self._own = open_tokenizer(path, end)
        self.end: int | None = self._own.end
        self.decode = self._own.decode

    def encode(self, text: str) -> list[int]:
        found = self._own.begun(self._own.encode(text))
        if not found and self.end is None:
            raise UsageError("an empty prompt needs a token that ends texts, to begin after it; give a prompt")
        return found or [self.end or 0]

    def encode_question(self, text: str) -> list[int]:
        from penstock.tools.train.data.chat import question_of

        return self._own.encode(question_of(self._own, text), special=False)


Codec = ByteCodec | TokenizerCodec


class Reader:
    """Turns tokens into text as they come. A token may be a part of a character: text comes once it is certain."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._written = 0

    def add(self, token: int) -> str:
        """Return the text that this token adds."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._new(text)

    def finish(self) -> str:
        """Return what is left."""
        return self._new(self._codec.decode(self._tokens))

    def _new(self, text: str) -> str:
        new, self._written = text[self._written :], len(text)
        return new


def codec_of(config: TrainConfig, origin: Mapping[str, Any] | None) -> Codec:
    """Choose what a run's tokens mean: by its tokenizer, else by that of the model's folder, else as bytes."""
    if path := tokenizer_path(config, (origin or {}).get("folder", "")):
        return TokenizerCodec(path, config.data.end)
    if reads_bytes(config):
        return ByteCodec()
    what = "rows held input_ids" if holds_rows(config.data) else f"data.tokens was {config.data.tokens}"
    raise UsageError(
        f"{what}, and nothing says what these numbers mean; text can be written where a tokenizer is in the model's "
        f"folder, or where tokens are bytes"
    )


def tokenizer_path(config: TrainConfig, folder: str) -> str:
    """Return the tokenizer of a run, else the folder of its model if that has one; empty where there is none."""
    if config.data.tokenizer:
        return config.data.tokenizer
    return folder if folder and any(Path(folder, name).is_file() for name in TOKENIZER_FILES) else ""


def reads_bytes(config: TrainConfig) -> bool:
    """Return whether a run without a tokenizer reads text as bytes; rows without one are numbers."""
    return config.data.tokens in ("bytes", "uint8") and not holds_rows(config.data)
