"""A store is asked by a thread of its own, so that whoever asks may give up."""

from __future__ import annotations

import threading

import pytest

from penstock.runtime.messages.store import Asker, NoAnswer


class Store:
    """Answers, raises, or waits to be let go."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def get(self, key: str) -> str:
        return f"value of {key}"

    def lost(self) -> None:
        raise ConnectionError("the host has left")

    def silent(self) -> None:
        self.free.wait(60)


def test_an_answer_and_an_error_come_from_the_store() -> None:
    asker = Asker(Store(), "asker")
    assert asker.ask("get", "a", patience=60, give_up=lambda seconds: True) == "value of a"
    with pytest.raises(ConnectionError, match="the host has left"):
        asker.ask("lost", patience=60, give_up=lambda seconds: True)
    assert asker.asked_at is None
    asker.close(60)


def test_who_asks_a_silent_store_may_give_up_and_it_is_known_since_when() -> None:
    store = Store()
    asker = Asker(store, "asker")
    waited: list[float] = []

    def give_up(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) == 3

    with pytest.raises(NoAnswer):
        asker.ask("silent", patience=0.01, give_up=give_up)
    assert waited == sorted(waited)
    assert asker.asked_at is not None
    store.free.set()
    asker.close(60)
