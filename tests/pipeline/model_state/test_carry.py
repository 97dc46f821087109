"""Named values go from the ranks that have them to those that want them, in one order, and no rank waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.errors import PeerFailure, UsageError
from penstock.pipeline.model_state import carry as module
from penstock.pipeline.model_state.carry import carried, carry

ITEMS = [("a", 0, [0, 1, 2]), ("b", 2, [0]), ("c", 1, [1]), ("d", 1, [0, 2])]


def takes_all(transport: Any) -> tuple[list[str], dict[str, int]]:
    asked: list[str] = []
    taken: dict[str, int] = {}

    def give(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.tensor(ord(name))

    carry(transport, ITEMS, give, lambda name, value: taken.update({name: int(value)}))
    return asked, taken


def test_each_value_is_asked_for_once_and_goes_to_those_who_want_it() -> None:
    asked, taken = zip(*values(run("threads", takes_all, ranks=3)), strict=True)
    assert asked == (["a"], ["c", "d"], ["b"])
    assert [list(each) for each in taken] == [["a", "b", "d"], ["a", "c"], ["a", "d"]]
    assert all(value == ord(name) for each in taken for name, value in each.items())


def test_without_a_transport_there_is_one_rank() -> None:
    assert dict(carried(None, ITEMS, str.upper)) == {"a": "A", "b": "B", "c": "C", "d": "D"}


def leaves_early(transport: Any) -> list[str]:
    found = []
    for name, _ in carried(transport, ITEMS, lambda name: name, {name: 100 for name, _, _ in ITEMS}):
        found.append(name)
        if transport.rank == 0:
            break
    return found


def test_a_rank_that_leaves_the_loop_still_hands_out_what_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD", 150)  # they wait for each other twice
    assert values(run("threads", leaves_early, ranks=3)) == [["a"], ["a", "c"], ["a", "d"]]


def knows_another_name(transport: Any) -> str:
    items = [*ITEMS, ("made", 1, [0])] if transport.rank == 1 else ITEMS
    with pytest.raises(UsageError) as caught:
        carry(transport, items, lambda name: name, lambda *_: None)
    return str(caught.value)


def test_a_name_that_not_all_ranks_know_is_said_before_anything_is_sent() -> None:
    for text in values(run("threads", knows_another_name, ranks=3)):
        assert text.startswith("made exists on ranks [1] of 3 only")


def cannot_give(transport: Any) -> str:
    def give(name: str) -> str:
        if name == "b":
            raise KeyError("mine")
        return name

    with pytest.raises((KeyError, PeerFailure)) as caught:
        carry(transport, ITEMS, give, lambda *_: None)
    return type(caught.value).__name__


def test_an_error_on_one_rank_ends_the_wait_of_those_that_it_owes_something() -> None:
    found = values(run("threads", cannot_give, ranks=3))
    assert (found[0], found[2]) == ("PeerFailure", "KeyError")
