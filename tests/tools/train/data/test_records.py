"""Rows of files from any place on, and what is no row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import FileError, UsageError
from penstock.tools.train.data.records import JsonLines, OwnRows, Parquet, open_rows, read_rows


def lines(path: Path, *texts: str) -> JsonLines:
    path.write_text("".join(f"{text}\n" for text in texts))
    return JsonLines(path)


def test_rows_of_several_files_go_on_from_every_position(tmp_path: Path) -> None:
    files = [
        lines(tmp_path / "a.jsonl", '{"n": 0}', "", '{"n": 1}'),
        lines(tmp_path / "b.jsonl"),
        lines(tmp_path / "c.jsonl", '{"n": 2}', '{"n": 3}'),
    ]
    found = list(read_rows(files))
    assert [record.values["n"] for record, _ in found] == [0, 1, 2, 3]
    for number, (_, position) in enumerate(found):
        assert [record.values["n"] for record, _ in read_rows(files, position)] == [0, 1, 2, 3][number + 1 :]


def test_a_row_knows_its_line(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", '{"n": 0}', "", '{"n": 1}', "[1]")
    rows = file.read(0)
    assert [str(next(rows).place) for _ in range(2)] == [f"{file.path}, line 1", f"{file.path}, line 3"]
    with pytest.raises(UsageError, match=r"a\.jsonl, line 4: it holds a list"):
        next(rows)


class Again:
    """Rows that can be read again, but not by number."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter([{"n": 0}, {"n": 1}, {"n": 2}])


@pytest.mark.parametrize("rows", [[{"n": 0}, {"n": 1}, {"n": 2}], Again()], ids=["list", "iterable"])
def test_rows_of_a_function_are_read_from_any_number_on(rows: object) -> None:
    own = OwnRows(rows, "mine:rows", "data.source")
    assert [(record.values["n"], record.after) for record in own.read(1)] == [(1, 2), (2, 3)]
    assert str(next(own.read(2)).place) == "mine:rows, row 2"


def test_what_cannot_be_read_twice_or_is_no_row_is_refused() -> None:
    with pytest.raises(UsageError, match="mine:rows returned an iterator, which can be read once"):
        OwnRows(iter([]), "mine:rows", "data.source")
    with pytest.raises(UsageError, match="mine:rows returned a int; return an iterable of rows"):
        OwnRows(3, "mine:rows", "data.source")
    with pytest.raises(UsageError, match="mine:rows, row 1 is a int; rows are dicts of columns"):
        list(OwnRows([{}, 4], "mine:rows", "data.source").read(0))


def test_files_take_no_options_of_a_function(tmp_path: Path) -> None:
    (file,) = open_rows("data.source", str(lines(tmp_path / "a.jsonl", "{}").path), {})
    assert isinstance(file, JsonLines)
    with pytest.raises(UsageError, match=r"data\.options are for a module:function; files take none"):
        open_rows("data.source", str(tmp_path / "a.jsonl"), {"seed": 1})


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"nothing", "does not end as one does"), (b"\xff\xff\xff\x7fPAR1", "its description has 2,147,483,647 bytes")],
)
def test_the_end_of_a_parquet_file_is_looked_at_first(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises((UsageError, FileError), match=words):
        list(Parquet(path).read(0))
