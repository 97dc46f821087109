"""One agreement for every group of processes: all find something, and an error of one is an error of all.

Where a member's work fails, the others wait for its answer in the exchange. So the error is the answer: the member
raises it when all have heard of it, and the others raise one that names the member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PeerFailure, PenstockError

Found = TypeVar("Found")


def in_words(error: BaseException) -> str:
    """Describe an error for others: one of ours, or of the system, speaks for itself."""
    return str(error) if isinstance(error, (PenstockError, OSError)) else f"{type(error).__name__}: {error}"


def agree(
    find: Callable[[], Found],
    exchange: Callable[[Any], list[Any]],
    *,
    describe: Callable[[BaseException], Any] = in_words,
    refuse: Callable[[int, Any], BaseException] = PeerFailure,
) -> list[Found]:
    """Return what each member finds, by its number; `exchange` gives all members' answers to all.

    An error travels as `describe` puts it; of the others', `refuse(number, description)` makes what is raised here.
    """
    mine: Found | None = None
    own: BaseException | None = None
    try:
        mine = find()
    except BaseException as error:  # Raised below: the others wait for this member's answer, whatever it is.
        own = error
    try:
        answers = exchange((mine, None if own is None else describe(own)))
    except PeerFailure:
        if own is None:
            raise
    if own is not None:
        raise own
    for number, (_, problem) in enumerate(answers):
        if problem is not None:
            raise refuse(number, problem)
    return [found for found, _ in answers]
