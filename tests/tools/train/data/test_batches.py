"""Batches: what they hold, that they depend on (seed, number) alone, and that a position can be taken up again."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import UsageError
from penstock.tools.train.config.paths import find_files
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatches
from penstock.tools.train.data.batches import IterableBatches, TokenBatches, open_data


def opened(*changes: str) -> DataBatches:
    return open_data(load_config(None, changes))


def text_file(folder: Path, name: str = "a.txt", size: int = 2000) -> Path:
    path = folder / name
    path.write_bytes(bytes(range(32, 127)) * (size // 95 + 1))
    return path


def test_a_batch_is_rows_of_the_text_and_the_target_is_one_further(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    data = opened(f"data.source={path}", "data.sequence=10", "data.batch=8")
    batch = data.at(0)
    (x,), y = batch.args, batch.target
    assert x.shape == y.shape == (8, 10)
    assert batch.tokens == 80
    assert torch.equal(x[:, 1:], y[:, :-1])
    content = path.read_bytes()
    assert all(bytes(row.tolist()) in content for row in x)


def test_a_batch_depends_on_seed_and_number_alone(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    settings = [f"data.source={path}", "data.sequence=10", "data.batch=8"]
    data, other = opened(*settings), opened(*settings)
    late = data.at(5)
    for number in range(3):
        other.at(number)
    torch.manual_seed(99)
    assert torch.equal(other.at(5).args[0], late.args[0])
    assert torch.equal(data.first().args[0], data.at(0).args[0])
    assert not torch.equal(data.at(6).args[0], late.args[0])
    assert not torch.equal(opened(*settings, "seed=5").at(5).args[0], late.args[0])


def test_validation_is_the_end_of_the_text_and_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    data = opened(f"data.source={path}", "data.sequence=10", "data.batch=8", "data.validation=0.1")
    assert set(data.at(3).args[0].flatten().tolist()) == {ord("a")}
    one = data.validation(0)
    assert one is not None
    assert set(one.args[0].flatten().tolist()) <= {ord("b"), ord("\n")}
    data.at(7)
    again = data.validation(0)
    assert again is not None
    assert torch.equal(again.args[0], one.args[0])
    assert opened(f"data.source={path}", "data.sequence=10", "data.validation=0").validation(0) is None


def test_number_files_make_batches_of_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(array.array("H", range(5000)).tobytes())
    data = opened(f"data.source={path}", "data.tokens=uint16", "data.sequence=16")
    (x,) = data.at(1).args
    assert x.dtype is torch.int64
    assert torch.equal(x[0] + 1, data.at(1).target[0])


def test_files_are_found_once_each_and_missing_ones_are_named(tmp_path: Path) -> None:
    first, second = text_file(tmp_path, "a.txt"), text_file(tmp_path, "b.txt")
    assert find_files([str(second), str(tmp_path / "*.txt")]) == [second, first]
    with pytest.raises(UsageError, match="matches no file"):
        find_files([str(tmp_path / "*.md")])
    with pytest.raises(UsageError, match="is a folder"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(("content", "words"), [(b"", "short.txt is empty"), (b"short", "one row takes 129")])
def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        opened(f"data.source={path}")


def test_other_tokens_than_the_checkpoints_are_noticed(tmp_path: Path) -> None:
    data = opened(f"data.source={text_file(tmp_path)}", "data.sequence=10")
    state = data.state_dict()
    other = opened(f"data.source={text_file(tmp_path, 'b.txt', 3000)}", "data.sequence=10")
    assert isinstance(other, TokenBatches)
    data.load_state_dict(state)
    other.load_state_dict(state)
    assert isinstance(data, TokenBatches)
    assert (data.changed, bool(other.changed)) == ("", True)


class Endless:
    """Of a user: a pure function of the number."""

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4, 2), float(number)), torch.zeros(4, 2)


class Shuffled:
    """Of a user: an iterable with a state of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 5:
            self.place += 1
            yield torch.full((2, 2), float(self.place)), torch.zeros(2, 2)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def listed() -> list[Any]:
    return [(torch.full((2, 2), float(number)), torch.zeros(2, 2)) for number in range(3)]


def generated() -> Iterator[Any]:
    yield from listed()


def nothing() -> list[Any]:
    return []


def odd(value: int = 3) -> Any:
    return [value]


def no_data() -> int:
    return 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "my_data", sys.modules[__name__])
    return "my_data"


def first_value(batch: Any) -> float:
    return float(batch.args[0].flatten()[0])


@pytest.mark.parametrize("name", ["Endless", "Shuffled", "listed"])
def test_a_users_batches_go_on_where_they_were(module: str, name: str) -> None:
    data = opened(f"data.source={module}:{name}")
    assert first_value(data.first()) == first_value(data.at(0))
    for number in range(1, 4):
        data.at(number)
    state = data.state_dict()
    wanted = [first_value(data.at(number)) for number in range(4, 9)]
    again = opened(f"data.source={module}:{name}")
    again.first()
    again.load_state_dict(state)
    assert [first_value(again.at(number)) for number in range(4, 9)] == wanted


def test_a_generator_goes_on_too_and_says_when_it_is_used_up(module: str) -> None:
    data = opened(f"data.source={module}:generated")
    data.first()
    assert [first_value(data.at(number)) for number in range(2)] == [0, 1]
    again = opened(f"data.source={module}:generated")
    again.first()
    again.load_state_dict(data.state_dict())
    assert first_value(again.at(2)) == 2
    with pytest.raises(UsageError, match="no batches left; return one that can be iterated again"):
        again.at(3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", [], "has no batches"),
        ("odd", [], "gave a int for a batch; give \\(inputs, target\\)"),
        ("odd", ["data.options.valu=3"], "does not take these options"),
        ("no_data", [], "returned a int; return an iterable"),
        ("missing", [], "has no missing; it has"),
        ("text_file.__name__", [], "is a str, not a function"),
    ],
)
def test_a_users_function_that_gives_no_batches_is_named(
    module: str, name: str, options: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        opened(f"data.source={module}:{name}", *options).at(0)


def test_a_module_that_is_not_there_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_data.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="there is no module not_there"):
        opened("data.source=not_there:f")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        opened("data.source=broken_data:f")


def test_an_iterable_is_not_asked_out_of_order() -> None:
    with pytest.raises(Exception, match="batch 3 was asked for, batch 0 is next"):
        IterableBatches(listed(), "mine").at(3)
