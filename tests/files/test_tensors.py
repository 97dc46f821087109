"""Tensors laid out as the file that they become: a copy of all of them, or one at a time."""

from __future__ import annotations

import zlib
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import UsageError
from penstock.files.tensors import TYPES, Body, FileLayout, TensorEntry, streamed, write_file

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
