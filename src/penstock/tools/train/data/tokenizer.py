"""A tokenizer from a local folder or file: text becomes numbers, chats become text by the tokenizer's own template.

A folder that transformers has written is opened by transformers; a `tokenizer.json` alone by the `tokenizers` library,
which loads in a fraction of the time. Nothing is downloaded, and code that lies in a folder is not run.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.files import TOKENIZER_FILES
from penstock.errors import UsageError
from penstock.reading import check_folder, parse_json, plain_path
from penstock.tools.train.config.paths import no_tokenizer

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
# The replacements of a tokenizer may make a text so many times as long; those that are in use have 1.
MOST_GROWTH = 1000
TOGETHER = 64  # texts that are encoded at once


class Encoded(NamedTuple):
    """The tokens of a text, and from which to which character each of them goes."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer:
    """Text to token numbers. `vocabulary` is the least number of tokens that a model must know."""

    def __init__(self, path: str, end: str = "") -> None:
        self.path = path
        file = Path(path).expanduser()
        if file.is_dir():
            check_folder(file)
        alone = file.is_file() or ((file / FILE).is_file() and not (file / CONFIG).is_file())
        self.of_transformers: Any = None if alone else _open_folder(file)  # It has the chat template.
        self._fast: Any = _open_file(file / FILE if file.is_dir() else file) if alone else None
        if self.of_transformers is not None and self.of_transformers.is_fast:
            self._fast = self.of_transformers.backend_tokenizer
        if self.of_transformers is not None:  # data.too_long decides about what is too long, as below
            self.of_transformers.model_max_length = sys.maxsize
        if self._fast is not None:  # A file may ask for both, but data.too_long decides.
            self._fast.no_truncation()
            self._fast.no_padding()
            for part in (self._fast.normalizer, self._fast.decoder):
                _check_growth(path, part)
        owner: Any = self._fast if alone else self.of_transformers
        known: dict[str, int] = owner.get_vocab()
        self.vocabulary = max(known.values(), default=-1) + 1
        self.end = self._end(end, known)
        text = "\n".join(f"{name}\t{number}" for name, number in sorted(known.items()))
        self.fingerprint = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _end(self, end: str, known: dict[str, int]) -> int | None:
        if end and end not in known:
            raise UsageError(f"data.end is {end!r}, which the tokenizer in {self.path} does not have")
        if end:
            return known[end]
        return None if self.of_transformers is None else self.of_transformers.eos_token_id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; with the special ones that the tokenizer puts around texts, or without."""
        if self._fast is not None and self.of_transformers is None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self.of_transformers(text, add_special_tokens=special, verbose=False)["input_ids"])

    def encode_all(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of each text, with its end; some texts are encoded at a time, on all cores."""
        taken = iter(texts)
        while some := list(islice(taken, TOGETHER)):
            if self.of_transformers is None:
                found = [each.ids for each in self._fast.encode_batch_fast(some)]
            else:
                found = self.of_transformers(some, verbose=False)["input_ids"]
            yield from map(self.ended, found)

    def ended(self, ids: list[int]) -> list[int]:
        """Append the token that ends a text, once."""
        return ids if self.end is None or (ids and ids[-1] == self.end) else [*ids, self.end]

    def begun(self, ids: list[int]) -> list[int]:
        """Remove the token that ends a text, where something follows."""
        return ids[:-1] if ids and ids[-1] == self.end else ids

    def spans(self, text: str) -> Encoded:
        """Return the tokens, and their places, of a text that holds its special ones already."""
        if self._fast is None:
            raise UsageError(
                f"the tokenizer in {self.path} cannot say which characters its tokens are of (it has no {FILE}), so "
                f"that answers cannot be told from questions; convert it to a fast one of transformers"
            )
        found = self._fast.encode(text, add_special_tokens=False)
        return Encoded(list(found.ids), list(found.offsets))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones left out."""
        if self.of_transformers is None:
            return str(self._fast.decode(list(ids)))
        return str(self.of_transformers.decode(list(ids), skip_special_tokens=True))


def _check_growth(path: str, part: Any) -> None:
    """Refuse replacements that make a text many times as long: in Rust, nothing interrupts them."""
    growth, parts = 1, [] if part is None else [parse_json(part.__getstate__(), path)]
    for each in parts:
        if isinstance(each, (dict, list)):
            parts += each.values() if isinstance(each, dict) else each
        if isinstance(each, dict):
            growth *= len(each.get("content") or each.get("prepend") or "1")
    if growth > MOST_GROWTH:
        raise UsageError(f"data.tokenizer: {path} replaces letters by texts of more than {MOST_GROWTH:,} letters")


@lru_cache(maxsize=4)
def open_tokenizer(path: str, end: str = "") -> Tokenizer:
    """Open the tokenizer of `data.tokenizer`."""
    return Tokenizer(path, end)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a tokenizer's files are in a folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _open_file(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Fast  # optional
    except ImportError:
        raise UsageError("data.tokenizer needs the tokenizers package: pip install 'penstock[data]'") from None
    try:
        return Fast.from_file(str(plain_path(path)))
    except Exception as error:  # tokenizers raises nothing narrower.
        raise UsageError(f"data.tokenizer: {path} is no file of a tokenizer ({FILE}): {error}") from None


def _open_folder(path: Path) -> Any:
    if not path.is_dir():
        raise UsageError(no_tokenizer(str(path)))
    if not has_tokenizer(path):
        raise UsageError(
            f"data.tokenizer: {path} holds no tokenizer (no {', '.join(TOKENIZER_FILES[:2])} or the like); "
            f"tokenizer.save_pretrained() writes one"
        )
    try:
        from transformers import AutoTokenizer  # optional, and slow to load
    except ImportError:
        raise UsageError("data.tokenizer is a folder of the transformers package: pip install transformers") from None
    loud = logging.getLogger("transformers.tokenization_utils_base")
    before = loud.level
    loud.setLevel(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"data.tokenizer: {path} cannot be read: {first} (code from the folder is not run)") from None
    finally:
        loud.setLevel(before)
