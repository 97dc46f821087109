"""Where in the order a step has failed: the grid of actions, with the failing one marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.compat.pipelining.actions import grid, orders_of
from penstock.errors import PeerFailure
from penstock.schedule import Schedule

__all__ = ["in_its_grid"]

AROUND = 6  # rows of the grid before the failing one, and after it


@contextmanager
def in_its_grid(name: str, program: Schedule | None) -> Iterator[None]:
    """A failure inside gets a note: the schedule's name, and the rows of the program around the failing action."""
    try:
        yield
    except PeerFailure as error:
        error.add_note(_note(name, program, error))
        raise


def _note(name: str, program: Schedule | None, error: PeerFailure) -> str:
    place = None
    if program is not None and error.action is not None and error.rank < program.ranks:
        row = program.rows[error.rank]
        whole = (number for number, each in enumerate(row) if each is not None and str(each) == error.action)
        parts = (
            number for number, each in enumerate(row) if each is not None and error.action in map(str, each.parts())
        )
        place = next(whole, next(parts, None))
    if program is None or place is None:
        return f"{name} was running"
    marked = grid(orders_of(program), place, error.rank, AROUND)
    return f"{name} failed at step {place} of rank {error.rank}, action {error.action}:\n{marked}"
