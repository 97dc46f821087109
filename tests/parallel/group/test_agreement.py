"""One agreement: what all find, and an error of one that becomes an error of all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import PeerFailure, UsageError
from penstock.parallel.group.agreement import agree


def run(finds: list[Callable[[], Any]], **options: Any) -> list[Any]:
    """What `agree` returns or raises on each of several threads that exchange their answers."""
    answers: list[Any] = [None] * len(finds)
    met = threading.Barrier(len(finds), timeout=20)
    results: list[Any] = [None] * len(finds)

    def member(number: int) -> None:
        def exchange(answer: Any) -> list[Any]:
            answers[number] = answer
            met.wait()
            return answers

        try:
            results[number] = agree(finds[number], exchange, **options)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=member, args=(number,)) for number in range(len(finds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def fails(error: BaseException) -> Callable[[], Any]:
    def find() -> Any:
        raise error

    return find


def test_all_get_what_each_has_found() -> None:
    assert run([lambda: 1, lambda: None, lambda: 3]) == [[1, None, 3]] * 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("no such batch"), "no such batch"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ],
)
def test_who_fails_raises_its_own_error_and_the_others_name_it(error: BaseException, words: str) -> None:
    first, second, third = run([lambda: 1, fails(error), lambda: 3])
    assert second is error
    for other in (first, third):
        assert isinstance(other, PeerFailure)
        assert other.rank == 1
        assert other.cause == words


def test_how_an_error_travels_and_what_others_make_of_it_can_be_chosen() -> None:
    first, second = run(
        [lambda: 1, fails(OSError("disk full"))],
        describe=lambda error: type(error).__name__,
        refuse=lambda number, problem: UsageError(f"process {number}: {problem}"),
    )
    assert isinstance(second, OSError)
    assert isinstance(first, UsageError)
    assert str(first) == "process 1: OSError"


def test_where_the_exchange_fails_an_own_error_comes_first() -> None:
    def lost(answer: Any) -> list[Any]:
        raise PeerFailure(2, "it is gone")

    with pytest.raises(UsageError, match="mine"):
        agree(fails(UsageError("mine")), lost)
    with pytest.raises(PeerFailure, match="gone"):
        agree(lambda: 1, lost)
