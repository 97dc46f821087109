"""A layout as bytes: nothing that arrives is run, and nothing is made that is no known container."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from faults.bombs import Bomb, loads_of

from penstock.errors import MessageError
from penstock.runtime.messages import plain
from penstock.runtime.transport.layout import encoding
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.shared_memory.meeting import read_note


def test_a_pickle_is_read_only_from_a_peer_that_is_known(tmp_path: Path) -> None:
    bomb = Bomb(str(tmp_path / "boom"))
    values = Layout.of(flatten([torch.ones(1), bomb]), False).text
    container = Layout.of(flatten(defaultdict(bomb.__reduce__()[0], a=torch.ones(1))), False).text
    for text in (values, container):
        with pytest.raises(MessageError, match="in a run without a secret"):
            encoding.load(text, is_known=False)
    assert not (tmp_path / "boom").exists()
    Layout.load(values, is_known=True).build(torch.zeros(256, dtype=torch.uint8), (), None)
    assert (tmp_path / "boom").exists()


def test_nor_a_place_or_a_layout_or_a_value(tmp_path: Path) -> None:
    for content in loads_of(str(tmp_path / "boom")):
        with pytest.raises(MessageError):
            read_note("place", "place/1", content)
        with pytest.raises(MessageError):
            encoding.load(content, is_known=True)
        with pytest.raises((MessageError, plain.NotPlainError)):
            encoding.load_plain(content)
        with pytest.raises((MessageError, plain.NotPlainError)):
            encoding.load_plain(b"P" + content)
    assert not (tmp_path / "boom").exists()


def test_a_layout_makes_no_type_that_is_not_a_known_container() -> None:
    spec = ("collections:namedtuple", {"type": "subprocess:Popen"}, [None])
    with pytest.raises(MessageError, match=r"subprocess:Popen.*neither a named tuple"):
        encoding.load(plain.dumps(("", spec, [None], b"", False)), is_known=True)
