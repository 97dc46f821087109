"""The processes that save one checkpoint together, and how they agree.

Where ranks are threads there is one. Exchanges go over the pipeline's own transport, which names a rank that died or
stalls; nothing here waits without an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import CheckpointError, PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["Processes"]

Mine = TypeVar("Mine")


class Processes:
    """`number` of `count`."""

    def __init__(self, pipe: Pipeline) -> None:
        world = getattr(pipe, "world", None)
        if world is None:
            raise UsageError(
                f"a {type(pipe).__name__} is not a penstock.Pipeline; make one of the model, or use `penstock "
                f"checkpoint export` for plain weights"
            )
        self._transport = world.transport
        self.count: int = 1 if self._transport is None else self._transport.ranks
        self.number: int = 0 if self._transport is None else self._transport.rank

    @property
    def first(self) -> bool:
        """Whether this process decides and finishes."""
        return self.number == 0

    def exchange(self, value: Any) -> list[Any]:
        """Every process's value."""
        return [value] if self._transport is None else self._transport.exchange(value)

    def lost(self) -> Exception | None:
        """The loss of a peer, if one is known; from any thread."""
        return None if self._transport is None else self._transport.broken

    def together(self, work: Callable[[], tuple[Mine, Any]], path: Any = None) -> tuple[Mine, list[Any]]:
        """Do something on every process; what fails on one is an error on all.

        `work` returns (what stays here, what all get to know); the result is the former and everyone's latter.
        """
        done: tuple[Mine, Any] | None = None
        own: Exception | None = None
        try:
            done = work()
        except (PenstockError, OSError) as error:  # the others wait for this process's answer, whatever it is
            own = error
        told = self.exchange((None if done is None else done[1], None if own is None else f"{own}"))
        if own is not None:
            raise own if isinstance(own, PenstockError) else CheckpointError(str(own), path=path) from own
        for number, (_, problem) in enumerate(told):
            if problem is not None:
                raise CheckpointError(f"process {number}: {problem}", path=path)
        assert done is not None
        return done[0], [each for each, _ in told]
