"""All tokens of a source in one piece: bytes of texts, mapped numbers, and a fingerprint that tells them apart."""

from __future__ import annotations

import array
from pathlib import Path

import pytest
from tiny_tokenizers import fast

from penstock.errors import UsageError
from penstock.tools.train.data.tokenizer import Tokenizer
from penstock.tools.train.data.tokens import read_tokens, stdlib_files


def test_the_standard_library_is_read_in_one_order() -> None:
    files = stdlib_files()
    assert len(files) > 100
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert files == stdlib_files()


def numbers(path: Path, count: int, change: int = 0) -> str:
    values = [n % 60000 for n in range(count)]
    values[-1] += change
    path.write_bytes(array.array("H", values).tobytes())
    return str(path)


def test_number_files_are_mapped(tmp_path: Path) -> None:
    path = numbers(tmp_path / "tokens.bin", 5000)
    tokens = read_tokens(path, "uint16")
    assert len(tokens) == 5000
    assert tokens.values[4999].item() == 4999
    assert tokens.part(10, 13).values.tolist() == [10, 11, 12]
    assert tokens.words == f"5,000 tokens in 1 file {path}"
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"123")
    with pytest.raises(UsageError, match="3 bytes, which are no whole number of uint16"):
        read_tokens(str(odd), "uint16")
    with pytest.raises(UsageError, match="one can be mapped"):
        read_tokens([path, str(odd)], "uint16")


def test_a_fingerprint_is_that_of_the_numbers_and_of_how_they_are_read(tmp_path: Path) -> None:
    one, again, other = (numbers(tmp_path / name, 5000, change) for name, change in (("a", 0), ("b", 0), ("c", 1)))
    fingerprint = read_tokens(one, "uint16").fingerprint
    assert read_tokens(again, "uint16").fingerprint == fingerprint
    assert read_tokens(other, "uint16").fingerprint != fingerprint
    assert read_tokens(one, "uint8").fingerprint != fingerprint


def test_texts_are_bytes_one_file_after_the_other_each_with_an_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zwei\n")
    (tmp_path / "a.txt").write_text("ein")
    tokens = read_tokens(str(tmp_path / "*.txt"), "bytes")
    assert bytes(tokens.values.tolist()) == b"ein\nzwei\n"
    assert tokens.words == f"9 tokens in 2 files from {tmp_path / 'a.txt'} to {tmp_path / 'b.txt'}"


def test_a_tokenizer_ends_every_file_and_takes_only_text(tmp_path: Path) -> None:
    fast().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path / "tokenizer.json"), "<|end|>")
    for name, text in (("a.txt", "Hello"), ("b.txt", "Bye")):
        (tmp_path / name).write_text(text)
    wanted = [*tokenizer.encode("Hello"), tokenizer.end, *tokenizer.encode("Bye"), tokenizer.end]
    assert read_tokens(str(tmp_path / "*.txt"), "bytes", tokenizer).values.tolist() == wanted
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"c\.txt is not UTF-8 text, which a tokenizer takes"):
        read_tokens(str(tmp_path / "*.txt"), "bytes", tokenizer)
