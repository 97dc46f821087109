"""Notes in the store: what no rank of this run has written under this name is not taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.bombs import loads_of

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure import notes


@pytest.mark.parametrize("kind", notes.PARTS)
def test_what_no_rank_has_written_is_not_taken_from_the_store(kind: str, tmp_path: Path) -> None:
    for content in loads_of(str(tmp_path / "boom")):
        with pytest.raises(notes.Tampered):
            notes.read(kind, kind, content)
    assert not (tmp_path / "boom").exists()


def test_a_note_that_is_copied_under_another_name_is_not_taken() -> None:
    failure = PeerFailure(1, "its step failed, and the next one did not")
    text = notes.write("penstock/0/news/3", failure).encode()
    assert str(notes.read("news", "penstock/0/news/3", text)[0]) == str(failure)
    for kind, name in (("news", "penstock/0/news/4"), ("verdict", "penstock/0/verdict")):
        with pytest.raises(notes.Tampered):
            notes.read(kind, name, text)
