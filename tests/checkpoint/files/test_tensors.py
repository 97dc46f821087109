"""Tensors laid out as the file that they become: a copy of all of them, or one at a time."""

from __future__ import annotations

import os
import zlib
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.checkpoint.files.tensors import (
    MOST_HEADER,
    TYPES,
    Body,
    FileLayout,
    TensorEntry,
    open_tensors,
    streamed,
    write_file,
)
from penstock.errors import FileError, UsageError

VALUES: dict[str, Tensor] = {
    str(dtype).removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype) for dtype in TYPES
} | {"nothing": torch.empty(0, 4), "scalar": torch.tensor(2.5)}


def layout() -> FileLayout:
    entries = [TensorEntry(key, value.dtype, tuple(value.shape), ()) for key, value in VALUES.items()]
    return FileLayout(entries, {"format": "pt"})


@pytest.mark.parametrize("copies", [True, False])
def test_safetensors_reads_every_type(copies: bool, tmp_path: Path) -> None:
    made, body = layout(), Body()
    if copies:
        body.fill(made, lambda entry: VALUES[entry.key])
    pieces = [body.view(made.bytes)] if copies else streamed(made, lambda entry: VALUES[entry.key])
    size, crc = write_file(tmp_path / "it", chain([made.header], pieces))
    content = (tmp_path / "it").read_bytes()
    assert (size, crc) == (len(content), f"{zlib.crc32(content):08x}")
    found = load_file(tmp_path / "it")
    assert found.keys() == VALUES.keys()
    for key, value in VALUES.items():
        assert found[key].dtype is value.dtype
        assert torch.equal(found[key].to(torch.complex64), value.to(torch.complex64))


def test_a_block_of_memory_is_used_again() -> None:
    made, body = layout(), Body()
    body.fill(made, lambda entry: VALUES[entry.key])
    before = bytes(body.view(made.bytes))
    place = body._memory
    body.fill(made, lambda entry: VALUES[entry.key])
    assert body._memory is place
    assert bytes(body.view(made.bytes)) == before


def test_a_type_that_files_do_not_have_is_named() -> None:
    with pytest.raises(UsageError, match=r"x has type torch.complex128, which safetensors does not support"):
        FileLayout([TensorEntry("x", torch.complex128, (1,), (0,))], {})


def test_the_header_of_a_file_has_a_bound(tmp_path: Path) -> None:
    """A file that names a million empty tensors took a second at each opening, and it is opened for every tensor."""
    empty = {f"{number}": torch.empty(0) for number in range(3)}
    save_file(empty, tmp_path / "few")
    with open_tensors(tmp_path / "few") as file:
        assert set(file.keys()) == set(empty)
    with (tmp_path / "many").open("wb") as file:
        file.write((MOST_HEADER + 1).to_bytes(8, "little"))
        file.truncate(2 * MOST_HEADER)
    with pytest.raises(FileError, match=r"many: its header has 16,777,217 bytes; at most 16,777,216 are read"):
        open_tensors(tmp_path / "many")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileError, match="it is not a plain file"):
        open_tensors(tmp_path / "fifo")
