"""Batches of rows: every row once per epoch, in an order of the seed's, and resumed at the exact row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.errors import ModelError, UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.batches import check_validation, open_data
from penstock.tools.train.data.row_batches import RowBatches

COUNT = 23


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Row n has n % 7 + 2 tokens, all of them n."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": [n] * (n % 7 + 2)}) for n in range(COUNT)) + "\n\n")
    return path


def opened(path: Path, *changes: str) -> RowBatches:
    settings = [f"data.source={path}", "data.sequence=8", "data.batch=4", "data.validation=0", "model.source=m:f"]
    data = open_data(load_config(None, [*settings, *changes]))
    assert isinstance(data, RowBatches)
    return data


def seen(batch: DataBatch) -> list[list[int]]:
    """The documents of a batch: by the targets, which are the tokens of each."""
    return [[each for each in dict.fromkeys(row) if each != -100] for row in batch.target.tolist()]


KINDS = {
    "padded": [],
    "packed": ["data.packing=true"],
    "streamed": ["data.streaming=true", "data.window=6"],
    "packed streams": ["data.streaming=true", "data.window=6", "data.packing=true"],
    "in order": ["data.shuffle=false"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_row_once_and_resumes_at_the_exact_row(rows: Path, kind: str) -> None:
    settings = [*KINDS[kind], "data.batch=1"]
    data, documents, states = opened(rows, *settings), [], []
    for number in range(3 * COUNT):
        states.append(json.loads(json.dumps(data.state_dict())))
        documents.append(seen(data.at(number))[0])
    flat = [each for row in documents for each in row]
    epochs = [flat[begin : begin + COUNT] for begin in (0, COUNT)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 2
    assert (epochs[0] == epochs[1]) == (kind == "in order")
    for number in (0, 1, 5, 17, 40):
        resumed = opened(rows, *settings)
        resumed.first()
        resumed.load_state_dict(states[number])
        assert resumed.changed == ""
        assert [seen(resumed.at(each))[0] for each in range(number, number + 6)] == documents[number : number + 6]


def test_looking_at_a_batch_does_not_take_it(rows: Path) -> None:
    data = opened(rows)
    before = data.state_dict()
    first = data.first()
    assert data.state_dict() == before
    assert torch.equal(data.at(0).target, first.target)
    with pytest.raises(ModelError, match="batch 5 was asked for, batch 1 is next"):
        data.at(5)
    assert not torch.equal(opened(rows, "seed=3").first().target, first.target)


def test_other_rows_than_the_checkpoints_are_noticed(rows: Path, tmp_path: Path) -> None:
    state = opened(rows).state_dict()
    other = tmp_path / "other.jsonl"
    other.write_text('{"input_ids": [1, 2]}\n' * 4)
    for settings in ([], ["data.streaming=true"]):
        data = opened(other, *settings)
        data.load_state_dict(state)
        assert "the rows are not those of the checkpoint" in data.changed


def test_replicas_have_rows_of_their_own(rows: Path) -> None:
    batch = opened(rows, "data.packing=true").at(0)
    parts = [seen(batch.share(number, 2)) for number in range(2)]
    assert parts[0] + parts[1] == seen(batch)


def test_validation_is_the_end_of_the_rows_or_a_file_of_its_own(rows: Path, tmp_path: Path) -> None:
    data = opened(rows, "data.validation=0.3")
    held_back = [seen(batch) for number in range(3) if (batch := data.validation(number)) is not None]
    assert held_back == [[[17], [18], [19], [20]], [[21], [22], [], []]]  # filled up with rows that do not count
    assert max(each for number in range(40) for row in seen(data.at(number)) for each in row) == 16
    own = tmp_path / "own.jsonl"
    own.write_text('{"input_ids": [99, 99]}\n')
    data = opened(rows, f"data.validation_source={own}", "data.streaming=true")
    batch = data.validation(0)
    assert batch is not None
    assert seen(batch)[0] == [99]
    assert data.validation(1) is None


def test_a_row_is_kept_for_validation_where_a_share_would_be_none(rows: Path) -> None:
    """Early stopping and the best checkpoint were off without a word when 5 % of the rows were not one."""
    small = ["data.validation=0.04"]  # of 23 rows
    held_back = opened(rows, *small).validation(0)
    assert held_back is not None
    assert seen(held_back) == [[COUNT - 1], [], [], []]
    assert opened(rows, *small, "evaluation.every=0").validation(0) is None  # nobody asks
    assert opened(rows).validation(0) is None  # none is wanted
    rows.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    assert opened(rows, *small).validation(0) is None  # the only one is trained on


@pytest.mark.parametrize("more", [["data.validation=0"], ["data.streaming=true"]])
def test_patience_without_anything_to_evaluate_with_is_refused(rows: Path, more: list[str]) -> None:
    settings = [f"data.source={rows}", "model.source=m:f", "evaluation.patience=2"]
    config = load_config(None, settings)
    check_validation(config, open_data(config))
    config = load_config(None, [*settings, *more])
    with pytest.raises(UsageError, match=r"evaluation.patience is 2, and there is not one row .*data.validation is 0"):
        check_validation(config, open_data(config))


def test_rows_that_do_not_fit(rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}\n{"input_ids": [1, 2]}\n')
    settings = ["data.sequence=4", "data.batch=1", "data.shuffle=false"]

    def targets(*more: str) -> list[list[int]]:
        data = opened(path, *settings, *more)
        return [[each for each in data.at(number).target[0].tolist() if each != -100] for number in range(4)]

    assert targets() == [[2, 3, 4, 5], [2]] * 2
    assert targets("data.too_long=drop") == [[2]] * 4
    assert targets("data.too_long=split") == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 11], [2]]
    assert "1 truncated, being of more than 4 tokens" in opened(path, *settings).words
    with pytest.raises(UsageError, match=r"long.jsonl, line 1 has 11 tokens, and one row takes 5"):
        opened(path, *settings, "data.too_long=error")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "{oops",
            "bad.jsonl, line 3: it is not JSON: Expecting property name enclosed in double quotes",
        ),
        ("[1, 2]", "bad.jsonl, line 3: it holds a list"),
        ('{"input_ids": [7]}', "bad.jsonl, line 3 has nothing to learn: 1 tokens"),
        ('{"input_ids": []}', "line 3 has nothing to learn: 0 tokens"),
        ('{"text": "a"}', "bad.jsonl, line 3 has no column 'input_ids'; it has text"),
        ('{"input_ids": "a"}', "line 3: input_ids is a str; it takes a list of whole numbers"),
        ('{"input_ids": [1, -2]}', "line 3: input_ids takes whole numbers from 0"),
    ],
)
def test_a_bad_row_is_named_before_the_first_step(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"input_ids": [1, 2]}}\n\n{line}\n')
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        opened(path)
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        opened(path, "data.streaming=true").first()


def test_rows_with_nothing_to_learn_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"input_ids": [7]}\n{"input_ids": [1, 2]}\n')
    data = opened(path, "data.empty=drop")
    assert "1 dropped, having nothing to learn" in data.words
    path.write_text('{"input_ids": [7]}\n')
    with pytest.raises(UsageError, match=r"none of the rows that were read \(1\) has anything to learn; name files"):
        opened(path, "data.empty=drop").first()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.columns={tokens='x'}"], "data.columns names 'tokens'"),
        (["data.format=text"], "rows of text need data.tokenizer|has no column 'text'"),
        (["data.columns={input_ids='ids'}"], "rows need messages.*data.columns names 'ids', which is not there"),
    ],
)
def test_columns_that_are_not_there(rows: Path, settings: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        opened(rows, *settings)


OWN = """
class Again:
    def __iter__(self):
        return ({"input_ids": [n] * 3} for n in range(6))

def listed(count): return [{"input_ids": [n] * 3} for n in range(count)]
def odd(): return [1]
def once(): return iter([])
"""


def test_rows_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = ["data.format=input_ids", "data.shuffle=false", "data.streaming=true", "data.window=1"]
    for name in (["own_rows:Again"], ["own_rows:listed", "data.options.count=6"]):
        data, resumed = (opened(Path(name[0]), *settings, *name[1:]) for _ in range(2))
        assert seen(data.at(0)) == [[0], [1], [2], [3]]
        resumed.load_state_dict(data.state_dict())
        assert seen(data.at(1)) == seen(resumed.at(1)) == [[4], [5], [0], [1]]
    for name, words in (("odd", "own_rows:odd, row 0 is a int"), ("once", "returned an iterator")):
        with pytest.raises(UsageError, match=words):
            opened(Path(f"own_rows:{name}"), "data.format=input_ids")


def test_keys_of_rows_are_refused_without_rows() -> None:
    with pytest.raises(UsageError, match=r"data.packing is for rows, and data.source has none"):
        open_data(load_config(None, ["data.packing=true"]))


@pytest.mark.slow
def test_rows_as_the_datasets_library_writes_them(tmp_path: Path) -> None:
    import datasets

    values = [{"ids": [n, n + 1]} for n in range(10)]
    made = datasets.Dataset.from_list(values)
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    made.to_parquet(tmp_path / "rows.parquet", batch_size=3)
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "splits")
    arrow = next((tmp_path / "splits" / "train").glob("*.arrow"))
    settings = ["data.columns={input_ids='ids'}", "data.shuffle=false", "data.streaming=true"]
    for path in (tmp_path / "saved", tmp_path / "rows.parquet", tmp_path / "splits" / "train", arrow):
        data = opened(path, *settings, "data.window=1")
        assert [seen(data.at(number)) for number in range(2)] == [[[1], [2], [3], [4]], [[5], [6], [7], [8]]]
        resumed = opened(path, *settings, "data.window=1")
        resumed.load_state_dict(data.state_dict())
        assert seen(resumed.at(2)) == [[9], [10], [1], [2]]
        assert seen(opened(path, settings[0]).at(0)) != [[1], [2], [3], [4]]
    with pytest.raises(UsageError, match="holds the splits train; name one"):
        opened(tmp_path / "splits")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="is no Parquet file"):
        opened(tmp_path / "bad.parquet")


@pytest.mark.timeout(120)
def test_compressed_rows_that_fill_the_memory_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("penstock.reading.MOST_MEMORY", 2**27)
    often = arrow.DictionaryArray.from_arrays([0] * 256, ["x" * 2**21])
    parquet.write_table(arrow.table({"text": often}), tmp_path / "rows.parquet", compression="zstd")
    few = arrow.table({"text": ["x" * 2**21] * 10})
    options = arrow.ipc.IpcWriteOptions(compression="zstd")
    with (
        arrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as file,
        arrow.ipc.new_stream(file, few.schema, options=options) as writer,
    ):
        for _ in range(80):
            writer.write_table(few)
    for name in ("rows.parquet", "rows.arrow"):
        assert (tmp_path / name).stat().st_size < 2**20
        with pytest.raises(UsageError, match=rf"{name}: what it holds takes more than 134,217,728 bytes"):
            opened(tmp_path / name, "data.format=text")
