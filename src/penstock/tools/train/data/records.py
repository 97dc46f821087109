"""Rows of files, one after the other, from any place where a run has stopped.

JSON lines are read here. Folders written by `save_to_disk` and Arrow files are mapped by the `datasets` library, of
which no decoder is used: a row may name an image, a FIFO among them, and would have it opened. Parquet is read by
pyarrow, which comes with `datasets`. A function of the user's may return rows as well. A position is two
numbers, the file and the place in it, so that a checkpoint can hold it and nothing before it is read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.errors import FileError, UsageError
from penstock.reading import (
    MOST_SETTINGS,
    NONSENSE,
    check_folder,
    memory_limit,
    open_plain,
    parse_json,
    read_json,
)
from penstock.tools.train.config.paths import JSON_LINES, find_paths
from penstock.tools.train.config.source import call_source, is_function

CHUNK = 256  # rows of a Parquet file that are made into Python's values at a time
MOST_ROW = 2**26  # bytes of a line
FOOTER = 8  # bytes at the end of a Parquet file: four for the length of its description, and a mark
MARKS = (b"PAR1", b"PARE")  # The second one is that of an encrypted description.


class RowFile(Protocol):
    """A file or folder of rows. Places in it are numbers, of which 0 is the beginning."""

    path: Path

    def read(self, begin: int) -> Iterator[Record]:
        """Yield the rows from a place on."""

    def number(self, begin: int) -> str:
        """Describe which row begins at a place."""


class RowPlace(NamedTuple):
    """Where a row stands; as text it is for the user, and worked out only then."""

    file: RowFile
    begin: int

    def __str__(self) -> str:
        return f"{self.file.path}, {self.file.number(self.begin)}"


class Record(NamedTuple):
    """One row: its columns, where it stands, and the place after it."""

    values: dict[str, Any]
    place: RowPlace
    after: int


def open_rows(key: str, source: str | Sequence[str], options: dict[str, Any]) -> list[RowFile]:
    """Open the files of rows, each ready to be read; or the rows that a function returns."""
    if isinstance(source, str) and is_function(source):
        return [OwnRows(call_source(key, source, options), source, key)]
    if options:
        raise UsageError("data.options are for a module:function; files take none")
    found: list[RowFile] = []
    for path in find_paths([source] if isinstance(source, str) else source, key):
        suffix = path.suffix.lower()
        found.append((JsonLines if suffix in JSON_LINES else Parquet if suffix == ".parquet" else Arrow)(path))
    return found


class JsonLines:
    """A file with one JSON object per line; a place is a number of bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, begin: int) -> Iterator[Record]:
        with open(open_plain(self.path), "rb") as file:
            file.seek(begin)
            while line := file.readline(MOST_ROW + 1):
                place = RowPlace(self, begin)
                begin += len(line)
                if len(line) > MOST_ROW:
                    raise FileError(place, f"it has more than {MOST_ROW:,} bytes; no more are read of a row")
                if line.strip():
                    yield Record(parse_json(line, place, dict), place, begin)

    def number(self, begin: int) -> str:
        with open(open_plain(self.path), "rb") as file:
            return f"line {file.read(begin).count(10) + 1}"


class _Numbered:
    """Rows whose places are their numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def number(self, begin: int) -> str:
        return f"row {begin}"


class Parquet(_Numbered):
    """A Parquet file; a place is a number of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _datasets()

    def read(self, begin: int) -> Iterator[Record]:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        _check_footer(self.path)
        try:
            with ParquetFile(self.path) as file:
                for first, rows in self._groups(file, begin):
                    for number, values in enumerate(rows, first):
                        if number >= begin:
                            yield Record(values, RowPlace(self, number), number + 1)
        except FileError:
            raise
        except (ArrowException, *NONSENSE) as error:
            raise UsageError(f"{self.path} is no Parquet file that can be read: {error}") from None

    def _groups(self, file: Any, begin: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield some rows with the number of the first; row groups that end before `begin` are not read."""
        first = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > begin:
                here, pieces = first, file.iter_batches(CHUNK, row_groups=[group])
                while some := self._next_rows(pieces):
                    yield here, some
                    here += len(some)
            first += rows

    def _next_rows(self, pieces: Iterator[Any]) -> list[dict[str, Any]]:
        with memory_limit(self.path):  # A small file may hold much: it is compressed.
            return next((piece.to_pylist() for piece in pieces if piece.num_rows), [])


def _check_footer(path: Path) -> None:
    """Refuse a file whose description would fill the memory, whatever its end says of that."""
    with open(open_plain(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - FOOTER))
        end = file.read(FOOTER)
    if end[4:] not in MARKS:
        raise UsageError(f"{path} is no Parquet file that can be read: it does not end as one does")
    length = int.from_bytes(end[:4], "little")
    if length > MOST_SETTINGS:
        raise FileError(path, f"its description has {length:,} bytes; at most {MOST_SETTINGS:,} are read")


class Arrow(_Numbered):
    """A folder that `Dataset.save_to_disk` has written, or an Arrow file of it; a place is a number of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        datasets = _datasets()
        if (path / "dataset_dict.json").is_file():
            splits = sorted(each.name for each in path.iterdir() if each.is_dir())
            raise UsageError(
                f"data.source: {path} holds the splits {', '.join(splits)}; name one, such as {path / splits[0]}"
            )
        if path.is_dir():
            check_folder(path)
        try:
            if path.is_dir():
                _check_inside(path)
            with memory_limit(path):  # What is compressed in it is read whole.
                rows = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
            self._rows = rows.with_format("arrow", columns=rows.format["columns"])  # rows as they are stored
        except NONSENSE as error:
            raise UsageError(f"data.source: {path} cannot be read: {error}") from None

    def read(self, begin: int) -> Iterator[Record]:
        for number in range(begin, len(self._rows)):
            place = RowPlace(self, number)
            try:
                with memory_limit(place):  # Lists of it may stand for the same values again and again.
                    row = self._rows[number]
                    row.validate(full=True)  # Arrow takes the places that a file names for its values as they are
                    values = row.to_pylist()[0]
            except NONSENSE as error:
                raise UsageError(f"{place} cannot be read: {error}") from None
            yield Record(values, place, number + 1)


def _check_inside(folder: Path) -> None:
    """Refuse a folder of rows that are elsewhere, where a FIFO may be."""
    named = [each["filename"] for each in read_json(folder / "state.json")["_data_files"]]
    if odd := [name for name in named if Path(name).name != name]:
        raise ValueError(f"state.json names {odd[0]!r}, which is not a file of the same folder")
    if len(set(named)) < len(named):
        raise ValueError("state.json names a file more than once")


class OwnRows(_Numbered):
    """Rows that a function of the user's returns, such as a `Dataset` of datasets; a place is a number of rows."""

    def __init__(self, rows: Any, words: str, key: str) -> None:
        super().__init__(Path(words))
        self._rows = rows
        if not hasattr(rows, "__iter__"):
            raise UsageError(
                f"{key}: {words} returned a {type(rows).__name__}; return an iterable of rows, each a dict"
            )
        if hasattr(rows, "__next__"):
            raise UsageError(
                f"{key}: {words} returned an iterator, which can be read once; return a list, a Dataset, or an object "
                f"whose __iter__ begins again"
            )

    def read(self, begin: int) -> Iterator[Record]:
        indexed = hasattr(self._rows, "__getitem__") and hasattr(self._rows, "__len__")
        numbers = range(begin, len(self._rows)) if indexed else count(begin)
        rows = map(self._rows.__getitem__, numbers) if indexed else islice(self._rows, begin, None)
        for number, values in zip(numbers, rows, strict=False):
            if not isinstance(values, dict):
                raise UsageError(f"{self.path}, row {number} is a {type(values).__name__}; rows are dicts of columns")
            yield Record(values, RowPlace(self, number), number + 1)


def _datasets() -> Any:
    try:
        import datasets  # optional, and slow to load
    except ImportError:
        raise UsageError(
            "data.source: Parquet and Arrow need the datasets package: pip install 'penstock[data]'"
        ) from None
    return datasets


Position = tuple[int, int]  # the file, and the place in it


def read_rows(files: Sequence[RowFile], position: Position = (0, 0)) -> Iterator[tuple[Record, Position]]:
    """Yield all rows from a position on, each with the position after it."""
    for number in range(position[0], len(files)):
        for record in files[number].read(position[1] if number == position[0] else 0):
            yield record, (number, record.after)
