"""Rows of a data set that somebody hands over: whatever is in them, they open nothing, and no size is believed.

An Arrow file that names an image made the `datasets` library open the path of the image when the row was read, a FIFO
among them, for ever; so did the name of a file in `state.json`. A line of a hundred gigabytes was read whole, numbers
above 2**31 were a traceback, and a compressed text was trained on as bytes, in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.tools.train.config.paths import find_files
from penstock.tools.train.config.settings import Data
from penstock.tools.train.data.documents import Encoder
from penstock.tools.train.data.records import MOST_ROW, open_rows, read_rows
from penstock.tools.train.data.tokens import read_tokens

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.timeout(60)
IDS = [[1, 2, 3, 4]] * 3


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Return a FIFO that nobody writes to: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file or folder."""
    return [record.values for record, _ in read_rows(open_rows("data.source", str(path), {}))]


def write_arrow(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    """Write an Arrow file as `datasets` does, with the features of its columns."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    schema = pa.schema([pa.field(name, column.type) for name, column in columns.items()], metadata=metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.table(list(columns.values()), schema=schema))
    return path


@pytest.mark.parametrize("kind", ["Image", "Audio", "Video", "Pdf", "Nifti"])
def test_what_a_row_names_is_not_opened(kind: str, fifo: Path, tmp_path: Path) -> None:
    named = pa.array(
        [{"bytes": None, "path": str(fifo)}] * 3, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    ids = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
    columns = {"input_ids": pa.array(IDS), "image": named}
    path = write_arrow(tmp_path / "rows.arrow", columns, {"input_ids": ids, "image": {"_type": kind}})
    assert [row["input_ids"] for row in read(path)] == IDS


def absolute(state: dict[str, Any], fifo: Path) -> None:
    state["_data_files"] = [{"filename": str(fifo)}]


def upwards(state: dict[str, Any], fifo: Path) -> None:
    state["_data_files"] = [{"filename": f"../{fifo.name}"}]


def many(state: dict[str, Any], fifo: Path) -> None:
    state["_data_files"] *= 100_000


@pytest.mark.parametrize("change", [absolute, upwards, many])
def test_a_saved_folder_has_its_rows_inside(
    change: Callable[[dict[str, Any], Path], None], fifo: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"input_ids": IDS}).save_to_disk(str(folder))
    assert [row["input_ids"] for row in read(folder)] == IDS
    state = json.loads((folder / "state.json").read_text())
    change(state, fifo)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match=r"state\.json names"):
        read(folder)


def test_a_format_of_the_folder_s_own_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"input_ids": IDS, "text": ["a"] * 3}).with_format("numpy", ["input_ids"]).save_to_disk(
        str(folder)
    )
    assert read(folder) == [{"input_ids": ids} for ids in IDS]


def test_places_outside_of_the_values_are_refused(tmp_path: Path) -> None:
    """Arrow takes a file's offsets as they are: a text from 0 to 2**30 was read from whatever the memory holds."""
    content = write_arrow(tmp_path / "rows.arrow", {"text": pa.array(["abc"])}).read_bytes()
    end = (3).to_bytes(4, "little")  # of the only text, which follows
    assert content.count(end + b"abc") == 1
    (tmp_path / "rows.arrow").write_bytes(content.replace(end + b"abc", (2**30).to_bytes(4, "little") + b"abc"))
    with pytest.raises(UsageError, match="row 0 cannot be read"):
        read(tmp_path / "rows.arrow")


def test_a_line_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"input_ids": [1, 2]}\n')
        file.truncate(100 * 2**30)
    with pytest.raises(UsageError, match=rf"rows\.jsonl, line 2: it has more than {MOST_ROW:,} bytes"):
        read(path)


def test_a_description_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with path.open("wb") as file:
        file.truncate(50 * 2**30)
        file.seek(-8, os.SEEK_END)
        file.write((0x70000000).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(UsageError, match="its description has 1,879,048,192 bytes"):
        read(path)


@pytest.mark.parametrize(
    "column",
    [pa.array([2**62], pa.timestamp("us")), pa.array([b"\xff\xfe"]).view(pa.string())],
    ids=["a date of no year", "no UTF-8"],
)
def test_values_that_python_has_not_are_refused_with_the_file(column: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "rows.parquet")
    write_arrow(tmp_path / "rows.arrow", {"text": column})
    for name in ("rows.parquet", "rows.arrow"):
        with pytest.raises(UsageError, match=f"{name}.* read"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "ids", ["[1, 2, 2147483648]", "[1, 9223372036854775808]", "[1, -1]", "[true, false]", "[1.5, 2]"]
)
def test_tokens_that_no_model_has_are_refused(ids: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"input_ids": {ids}}}\n')
    ((record, _),) = read_rows(open_rows("data.source", str(tmp_path / "rows.jsonl"), {}))
    with pytest.raises(UsageError, match="line 1: input_ids takes whole numbers from 0 to 2,147,483,647"):
        Encoder(Data()).encode(record)


def test_numbers_that_cannot_be_mapped_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    with (tmp_path / "numbers").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(UsageError, match=r"numbers \(8,796,093,022,208 bytes\) cannot be mapped"):
        read_tokens(str(tmp_path / "numbers"), "uint8")


def test_a_compressed_text_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "text.txt.gz").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(UsageError, match=r"text\.txt\.gz is compressed"):
        find_files([str(tmp_path / "*")])
