"""Where tokens come from: the running Python's own library, text files, or memory-mapped numbers.

Each is one long tensor of tokens. Text is its bytes, file after file in the order of their names. Number
files are mapped and not read: a rank touches only the pages of its batches. A fingerprint tells whether a run goes on
with the tokens that it began with.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.tools.train.config.paths import find_files
from penstock.tools.train.data.tokenizer import Tokenizer

DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32, "int64": torch.int64}
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}  # not text of the library
PROBE = 4096  # tokens at each end of a mapped file that its fingerprint reads


@dataclass(frozen=True)
class Tokens:
    """All tokens of a source, in one piece."""

    values: Tensor  # one dimension; of any whole-number type
    fingerprint: str
    words: str  # Tells the user what was read.

    def __len__(self) -> int:
        return self.values.numel()

    def part(self, first: int, end: int) -> Tokens:
        return Tokens(self.values[first:end], self.fingerprint, self.words)


def read_tokens(source: str | Sequence[str], kind: str, tokenizer: Tokenizer | None = None) -> Tokens:
    """Read the tokens of `data.source`, where that is no function and has no rows."""
    if source == "stdlib":
        files, what = stdlib_files(), "of Python's standard library"
    else:
        files = find_files([source] if isinstance(source, str) else source)
        what = str(files[0]) if len(files) == 1 else f"from {files[0]} to {files[-1]}"
    if tokenizer is not None:
        found = _tokenized(files, tokenizer)
    else:
        found = _from_text(files) if kind == "bytes" else _mapped(files, kind)
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    return Tokens(found.values, found.fingerprint, f"{len(found):,} tokens in {counted} {what}".strip())


def stdlib_files() -> list[Path]:
    """List the source files of the standard library of the Python that runs this, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in LEFT_OUT)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not found:
        raise UsageError(f"this Python keeps no source files in {root}; set data.source to text files of your own")
    return found


def _from_text(files: Sequence[Path]) -> Tokens:
    content = bytearray()
    for path in files:
        content += path.read_bytes()
        if content and content[-1] != ord("\n"):
            content += b"\n"
    digest = hashlib.sha256(content).hexdigest()
    values = (
        torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return Tokens(values, digest, "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text, which a tokenizer takes: {error}") from None


def _tokenized(files: Sequence[Path], tokenizer: Tokenizer) -> Tokens:
    """Return the tokens of all files, each followed by the one that ends a text."""
    values = array("i")
    for ids in tokenizer.encode_all(map(_text, files)):
        values.extend(ids)
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    return Tokens(torch.tensor(values, dtype=torch.int32, device="cpu"), digest, "")


def _mapped(files: Sequence[Path], kind: str) -> Tokens:
    dtype = DTYPES[kind]
    if len(files) > 1:
        raise UsageError(
            f"data.source has {len(files)} files of numbers (data.tokens is {kind}); one can be mapped: join them"
        )
    path, size = files[0], files[0].stat().st_size
    if size % dtype.itemsize:
        raise UsageError(
            f"{path} has {size} bytes, which are no whole number of {kind} ({dtype.itemsize} bytes each); data.tokens "
            f"says how it was written"
        )
    count = size // dtype.itemsize
    values = torch.empty(0, dtype=dtype, device="cpu")
    try:
        if count:
            values = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    except RuntimeError as error:
        raise UsageError(f"{path} ({size:,} bytes) cannot be mapped: {error}") from None
    probe = hashlib.sha256(f"{kind} {count}".encode())
    for piece in (values[:PROBE], values[-PROBE:]):
        probe.update(bytes(piece.to(torch.int64).view(torch.uint8).tolist()))
    return Tokens(values, probe.hexdigest(), "")
